"""Commands to Redis at the price of a round trip."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

import redis
from redis.exceptions import NoPermissionError

from producer.scripts import script


class Link:
    """Sends single commands over connections of its own, one for each thread that is in a call.

    redis-py's way through pool, retries and callbacks costs about as much processor time as the
    round trip itself on loopback; the queue's few commands need none of it. Thread-safe. Calls
    raise redis-py's errors and are never repeated here. Closing `client` closes its connections;
    a link that ends before its client is closed itself.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self._idle: deque[Any] = deque()
        self._scripts: dict[str, tuple[str, str]] = {}

    def call(self, *command: Any) -> Any:
        """The plain RESP2 answer of one command; raises redis-py's errors."""
        try:
            return self._exchange(command)
        except NoPermissionError as failure:
            raise _denied(failure, command[:12]) from failure

    def _exchange(self, command: tuple[Any, ...]) -> Any:
        connection = self._take()
        try:
            connection.send_packed_command(connection.pack_command(*command), check_health=False)
            answer = connection.read_response()
        except redis.exceptions.ResponseError:
            self._idle.append(connection)
            raise
        except BaseException:
            self._drop(connection)
            raise
        self._idle.append(connection)
        return answer

    def script(self, name: str, script_keys: tuple[str, ...] | list[str], args: list[Any]) -> Any:
        """Runs `lua/<name>.lua`, which Redis knows by its hash after the first time."""
        known = self._scripts.get(name)
        if known is None:
            text = script(name)
            known = self._scripts[name] = text, hashlib.sha1(text.encode()).hexdigest()
        text, digest = known
        try:
            try:
                return self._exchange(("EVALSHA", digest, len(script_keys), *script_keys, *args))
            except redis.exceptions.NoScriptError:
                return self._exchange(("EVAL", text, len(script_keys), *script_keys, *args))
        except redis.exceptions.ResponseError as failure:
            if _is_denied(failure):
                raise _denied(failure, ("script", name, "on", *script_keys)) from failure
            if is_out_of_memory(failure):
                raise redis.exceptions.OutOfMemoryError(str(failure)) from failure
            raise

    def close(self) -> None:
        """Gives the idle connections back to the client."""
        while self._idle:
            self.client.connection_pool.release(self._idle.pop())

    def _take(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            return self.client.connection_pool.get_connection()

    def _drop(self, broken: Any) -> None:
        """Lets go of a broken connection, and of idle ones, which probably broke with it."""
        while True:
            broken.disconnect()
            self.client.connection_pool.release(broken)
            try:
                broken = self._idle.pop()
            except IndexError:
                return


def _is_denied(failure: redis.exceptions.ResponseError) -> bool:
    # Redis wraps what a command in a script is refused for into a text of its own.
    text = str(failure)
    return (
        isinstance(failure, NoPermissionError)
        or "user executing the script can't" in text
        or "ACL failure in script" in text
    )


def _denied(failure: Exception, command: tuple[Any, ...]) -> NoPermissionError:
    return NoPermissionError(f"{failure} ({' '.join(map(str, command))})")


def is_out_of_memory(failure: redis.exceptions.ResponseError) -> bool:
    """True if Redis refused for its maxmemory, in a command or in a script's command."""
    # Redis 6.2 wraps what a command in a script answers into a text of its own.
    return isinstance(failure, redis.exceptions.OutOfMemoryError) or "-OOM " in str(failure)
