"""A Redis whose users have the rules that `trtq acl` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis

from producer.acl import User, rules
from producer.embedded import EmbeddedRedis


class Guarded(NamedTuple):
    """The server, and its administrator's connection, which asks for no login."""

    port: int
    admin: redis.Redis
    passwords: Path

    def url(self, user: str) -> str:
        """The URL with which `user` logs in."""
        return f"redis://{user}:{self.password(user)}@127.0.0.1:{self.port}/0"

    def password(self, user: str) -> str:
        """The password in the user's file."""
        return (self.passwords / user).read_text().strip()

    def set(self, user: User, without: Sequence[str] = ()) -> None:
        """Gives a user its rules, less some."""
        line = rules([user], self.passwords, generate=True)[1]
        words = [word for word in line.split()[1:] if word not in without]
        self.admin.execute_command("ACL", "SETUSER", *words)

    def denials(self) -> list[tuple[str, str]]:
        """(user, what: a command, key or channel) refused since the last call.

        Without CLIENT, by which drivers tell their names and versions.
        """
        answer: Any = self.admin.execute_command("ACL", "LOG")
        self.admin.execute_command("ACL", "LOG", "RESET")
        return [
            (found["username"], found["object"])
            for found in (_texts(entry) for entry in answer)
            if found["object"] != "client"
        ]


def _texts(entry: Any) -> dict[str, str]:
    pairs = entry.items() if isinstance(entry, dict) else zip(entry[0::2], entry[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def guarded_redis(users: Sequence[User], folder: Path) -> Iterator[Guarded]:
    """A server with `users`; user `default` stays, for the test itself."""
    with EmbeddedRedis() as server, redis.Redis(port=server.port, protocol=2) as admin:
        made = Guarded(server.port, admin, folder / "passwords")
        for user in users:
            made.set(user)
        yield made
