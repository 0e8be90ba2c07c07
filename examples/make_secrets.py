"""Writes what compose.yaml's secrets name: passwords, Redis' access rules, Flower's login.

Run it with `make secrets`. What is there already stays as it is.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from producer.acl import Role, User, rules

#: Users of Redis. `client` is for your own programs.
USERS = [
    User("admin", Role.ADMIN),
    User("worker", Role.WORKER),
    User("exporter", Role.MONITOR),
    User("flower", Role.FLOWER),
    User("operator", Role.OPERATOR),
    User("client", Role.PRODUCER),
]


def make_secrets(folder: Path) -> None:
    """Writes the missing files of `folder`, which becomes its owner's alone.

    Files are readable for all: mounted into a container, they are read by its own user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    (folder / "users.acl").write_text("\n".join(rules(USERS, folder, generate=True)) + "\n")
    texts = {"flower-login": f"operator:{secrets.token_urlsafe(18)}"}
    texts["grafana-admin"] = secrets.token_urlsafe(18)
    for name, text in texts.items():
        if not (folder / name).exists():
            (folder / name).write_text(f"{text}\n")
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    wanted = Path(os.environ.get("TRTQ_SECRETS", "secrets"))
    make_secrets(wanted)
    print(f"{wanted}: {', '.join(sorted(file.name for file in wanted.iterdir()))}", file=sys.stderr)
