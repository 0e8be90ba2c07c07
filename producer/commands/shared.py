"""What all commands share: the Redis option, errors as one line, an open client."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import redis
import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from producer.errors import (
    ConfigError,
    FileFormat,
    FileMissing,
    InvalidInput,
    OutputMismatch,
    PathNotAllowed,
    TrtqError,
)

if TYPE_CHECKING:
    from rich.console import Console

    from producer.client import Client
    from producer.config import ProducerSettings

DEFAULT_URL = "redis://127.0.0.1:6379/0"

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_ROWS_FAILED = 3
EXIT_INTERRUPTED = 130

#: What repeating the command cannot mend: the caller or the operator has to change something.
_REFUSED = (ConfigError, InvalidInput, FileFormat, FileMissing, OutputMismatch, PathNotAllowed)

RedisUrl = Annotated[
    str,
    typer.Option(
        "--redis-url",
        envvar="TRTQ_REDIS_URL",
        help="Redis, as redis://[:password@]host:port/db (rediss:// for TLS).",
    ),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of a model, see `trtq models`.")]
Priority = Annotated[str, typer.Option(help="high, normal or low.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class CommandGroup(TyperGroup):
    """Shows an error as one line and an exit code: 2 if the request is wrong, else 1."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except TrtqError as error:
            show_error(error.code, _without_password(error.message))
            refused = isinstance(error, _REFUSED)
            raise typer.Exit(EXIT_REFUSED if refused else EXIT_FAILED) from None
        except redis.exceptions.RedisError as error:
            show_error("redis_refused", str(error))
            raise typer.Exit(EXIT_FAILED) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            show_error("system", str(error))
            raise typer.Exit(EXIT_FAILED) from None


def _without_password(message: str) -> str:
    """An error may quote the URL as it was given, in the environment or as an option."""
    from producer.config import redact

    for url in (os.environ.get("TRTQ_REDIS_URL"), *sys.argv[1:]):
        for text in (url, (url or "").partition("=")[2]):
            if text and "://" in text:
                message = message.replace(text, redact(text))
    return message


def show_error(code: str, message: str) -> None:
    """One red line on stderr."""
    line = " ".join(message.split())
    typer.secho(f"error [{code}]: {line}", fg=typer.colors.RED, err=True)


def stdout() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for whole lines in a pipe."""
    from rich.console import Console

    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=240)


@contextmanager
def open_client(redis_url: str) -> Iterator[Client]:
    """A started client; raises ConfigError, RedisUnavailable."""
    from producer.client import Client

    with Client(settings=read_settings(redis_url), name="cli") as client:
        yield client


def read_settings(redis_url: str) -> ProducerSettings:
    """The settings in the environment; raises ConfigError for one that is wrong."""
    from producer.config import ProducerSettings

    try:
        return ProducerSettings(redis_url=redis_url)
    except ValidationError as failure:
        wrong = failure.errors(include_url=False)[0]
        name = "TRTQ_" + "_".join(map(str, wrong["loc"])).upper()
        raise ConfigError(f"{name}={wrong['input']!r}: {wrong['msg']}") from None


@contextmanager
def open_redis(redis_url: str) -> Iterator[redis.Redis]:
    """A connection, its errors named; raises ConfigError, RedisUnavailable."""
    from producer.connection import connect, named_errors

    with connect(redis_url) as connection, named_errors(redis_url):
        connection.ping()
        yield connection
