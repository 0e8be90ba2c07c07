"""What all commands share: the Redis option, errors as one line, tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import redis
import typer

from producer.config import redact
from producer.connection import connect, named_errors
from producer.errors import ConfigError, InvalidInput, TrtqError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ROWS_FAILED = 3
EXIT_INTERRUPTED = 130
DEFAULT_URL = "redis://127.0.0.1:6379/0"

RedisUrl = Annotated[
    str,
    typer.Option(
        "--redis-url",
        envvar="TRTQ_REDIS_URL",
        metavar="URL",
        help="Redis, as redis://[:password@]host:port/db.",
    ),
]

P = ParamSpec("P")
R = TypeVar("R")


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """The command, with a TrtqError as one line on stderr and an exit code.

    2 for what the caller must change (ConfigError, InvalidInput), else 1.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except TrtqError as failure:
            message = failure.message
            url = kwargs.get("redis_url")
            if isinstance(url, str) and url:
                # An error may quote the URL as it was given, password and all.
                message = message.replace(url, redact(url))
            typer.echo(f"error [{failure.code}]: {' '.join(message.split())}", err=True)
            usage = isinstance(failure, (ConfigError, InvalidInput))
            raise typer.Exit(EXIT_USAGE if usage else EXIT_FAILED) from None

    return run


@contextmanager
def connected(url: str) -> Iterator[redis.Redis]:
    """A connection that answers; raises RedisUnavailable, ConfigError."""
    connection = connect(url)
    try:
        with named_errors(url):
            connection.ping()
            yield connection
    finally:
        connection.close()


def console(*, stderr: bool = False) -> Console:
    """A console; wide where nobody looks at it, so that a pipe gets whole lines."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    return made if made.is_terminal else Console(stderr=stderr, highlight=False, width=200)
