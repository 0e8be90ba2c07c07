"""Access rules of Redis: one user for each party, with the commands and keys that it needs.

Redis 6.2 gives a user each of its commands on each of its keys. So a producer has no command that
could read a task, or end or overwrite a key, also where our own scripts would be glad of one: no
XREAD, XRANGE, SET, DEL, EXPIRE. What it has on streams is XADD, XDEL and counting.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from producer import keys
from producer.address import read_secret
from producer.errors import ConfigError, InvalidInput

_CONNECT = "ping select"
_SCRIPTS = "eval evalsha time"
_SPECS = "hget hkeys hgetall"
_ADD = "exists xadd xlen xpending xgroup|create get getset getex hmget hincrby lpush"
_BELLS = "zadd zcount zremrangebyscore"
_CANCEL = "xdel"
_REPLIES = "blmove lindex lrange ltrim"
_PRODUCER = f"{_CONNECT} {_SCRIPTS} {_SPECS} {_ADD} {_BELLS} {_CANCEL} {_REPLIES}"
_LOOK = "scan mget llen xrange info"
_QUEUE = "xreadgroup xack xclaim xinfo zpopmin zrange zrem zscore"
_ANSWER = "set del expire pexpire rpush hset xgroup|delconsumer xgroup|destroy"
_LETTERS = "incrby decrby expireat"
_BROKER = (
    "eval evalsha script|load script|exists time multi exec discard watch unwatch lpush rpush "
    "brpop llen sadd smembers srem hget hset hdel exists del zadd zrange zrem zrangebyscore "
    "zrevrangebyscore publish subscribe unsubscribe psubscribe punsubscribe"
)
_PIDBOX = ("*.celery.pidbox*", "_kombu.binding*")
# Redis grants a pattern subscription only what is written here letter for letter.
_FANOUT = ("/{db}.celeryev/*", "/{db}.celery.pidbox")
_RESULTS = "celery-task-meta-*"


class Role(str, Enum):
    """What a user does."""

    ADMIN = "admin"
    WORKER = "worker"
    PRODUCER = "producer"
    CELERY = "celery"
    MONITOR = "monitor"
    OPERATOR = "operator"
    FLOWER = "flower"


class User(NamedTuple):
    """A user of Redis. `models` restricts a producer; empty allows all."""

    name: str
    role: Role
    models: tuple[str, ...] = ()


class Rights(NamedTuple):
    """Commands, key patterns and channel patterns."""

    commands: str
    keys: Sequence[str]
    channels: Sequence[str] = ()


def rights_of(user: User) -> Rights:
    """What `user` may do."""
    if user.role is Role.PRODUCER:
        return Rights(_PRODUCER, _producer_keys(user))
    if user.role is Role.ADMIN:
        return Rights("@all", ["*"], ["*"])
    return _RIGHTS[user.role]


_RIGHTS = {
    Role.WORKER: Rights(
        f"{_PRODUCER} {_LOOK.replace(' info', '')} {_QUEUE} {_ANSWER} {_LETTERS} {_BROKER} setex",
        ["trtq:*", "trtq.*", "unacked*", "celeryev*", *_PIDBOX, _RESULTS],
        [*_FANOUT, _RESULTS],
    ),
    Role.CELERY: Rights(
        f"{_CONNECT} multi exec lpush llen sadd smembers get mget subscribe unsubscribe del",
        [f"{keys.INFER_QUEUE}*", f"_kombu.binding*.{keys.INFER_QUEUE}", _RESULTS],
        [_RESULTS],
    ),
    Role.MONITOR: Rights(
        f"{_CONNECT} {_SCRIPTS} {_SPECS} {_LOOK} exists xlen xpending hmget zcount xrevrange",
        ["trtq:*", "trtq.*"],
    ),
    Role.OPERATOR: Rights(
        f"{_PRODUCER} {_LOOK} {_LETTERS} xreadgroup xack set del expire rpush xrevrange "
        "xgroup|delconsumer",
        ["trtq:*", "trtq.*"],
    ),
    Role.FLOWER: Rights(
        f"{_CONNECT} info {_BROKER} get set pexpire",
        ["trtq.*", "unacked*", "celeryev*", *_PIDBOX],
        _FANOUT,
    ),
}


def _producer_keys(user: User) -> list[str]:
    patterns = [f"trtq:reply:{user.name}.*", f"trtq:result:{user.name}.*", keys.MODELS]
    for model in user.models or ("*",):
        base = f"trtq:{{{model}}}"
        patterns += [f"{base}:{part}" for part in ("in:*", "bells", "turns", "workers", "load")]
        patterns += [f"{base}:{part}" for part in ("cancelled", "events")]
        patterns += [f"{base}:seen:*:{user.name}.*", f"trtq.{model}"]
    return patterns


def parse_user(text: str, role: Role) -> User:
    """NAME, or NAME=MODEL,MODEL for a producer of these models only; raises ConfigError."""
    name, separator, models = text.partition("=")
    try:
        keys.check_client_name(name)
        found = tuple(keys.check_name(model) for model in models.split(",")) if separator else ()
    except InvalidInput as failure:
        raise ConfigError(f"--{role.value} {text!r}: {failure}") from None
    if found and role is not Role.PRODUCER:
        raise ConfigError(f"--{role.value} {text!r}: only producers are restricted to models")
    if name == "default":
        raise ConfigError("user 'default' is who does not log in: it is switched off")
    return User(name, role, found)


def rules(
    users: Sequence[User], passwords: Path | None, *, generate: bool = False, db: int = 0
) -> list[str]:
    """The lines of an ACL file: `default` off, then `users` of Redis database `db`.

    `passwords` is a folder with a file for each user, named as the user, that holds the password;
    the lines hold its SHA-256 only. With `generate`, missing ones are made (mode 0600). Without a
    folder, the lines have a placeholder that Redis refuses to load. Raises ConfigError.
    """
    names = [user.name for user in users]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ConfigError(f"users {sorted(twice)} are named twice: each has one role")
    lines = ["user default reset resetchannels"]
    for user in users:
        if passwords is None:
            digest = f"SHA256-OF-THE-PASSWORD-OF-{user.name}"
        else:
            secret = _password(passwords / user.name, generate)
            digest = hashlib.sha256(secret.encode()).hexdigest()
        commands, patterns, channels = rights_of(user)
        parts = [f"user {user.name} reset resetchannels on #{digest}"]
        parts += [f"~{pattern}" for pattern in patterns]
        parts += [f"&{pattern.format(db=db)}" for pattern in channels]
        parts += [f"+{command}" for command in dict.fromkeys(commands.split())]
        lines.append(" ".join(parts))
    return lines


def _password(file: Path, generate: bool) -> str:
    if generate:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(file, "x", opener=_private) as made:
                made.write(secrets.token_urlsafe(32) + "\n")
        except FileExistsError:
            pass
        except OSError as failure:
            raise ConfigError(f"password file {file} cannot be made: {failure}") from failure
    elif not file.exists():
        raise ConfigError(f"password file {file} does not exist: write it, or use --generate")
    return read_secret(str(file), "--passwords")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
