"""What all commands share: the Redis option, errors as one line, an open client."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager
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

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_ROWS_FAILED = 3
EXIT_INTERRUPTED = 130

#: What repeating the command cannot mend: the caller or the operator has to change something.
_REFUSED = (ConfigError, InvalidInput, FileFormat, FileMissing, OutputMismatch, PathNotAllowed)

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        help="Redis, as redis://[user@]host:port/db (rediss:// for TLS); its password from "
        "TRTQ_REDIS_PASSWORD_FILE. Or the whole in TRTQ_REDIS_URL, or TRTQ_REDIS_URL_FILE.",
        show_default="TRTQ_REDIS_URL, or redis://127.0.0.1:6379/0",
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
            show_error(error.code, error.message)
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


def show_error(code: str, message: str) -> None:
    """One red line on stderr."""
    typer.secho(f"error [{code}]: {one_line(message)}", fg=typer.colors.RED, err=True)


def one_line(message: str) -> str:
    """`message` without line breaks and what a terminal would obey."""
    from producer.quote import printable

    return printable(" ".join(message.split()))


def stdout() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for whole lines in a pipe."""
    from rich.console import Console

    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=240)


def producer_settings() -> ProducerSettings:
    """The environment's settings; raises ConfigError that names a wrong variable."""
    from producer.config import ProducerSettings, wrong_setting

    try:
        return ProducerSettings()
    except ValidationError as failure:
        raise wrong_setting(failure) from None


def url_for(redis_url: str | None) -> str:
    """The whole URL of Redis from the option, or else from the environment; raises ConfigError."""
    from producer.address import has_password

    if redis_url and has_password(redis_url):
        typer.secho(
            "warning: every user of this machine can see the password in --redis-url (ps); use "
            "TRTQ_REDIS_URL or TRTQ_REDIS_PASSWORD_FILE",
            fg=typer.colors.YELLOW,
            err=True,
        )
    return producer_settings().url_for(redis_url)


@contextmanager
def open_client(redis_url: str | None) -> Iterator[Client]:
    """A started client; raises ConfigError, RedisUnavailable."""
    from producer.client import Client

    url, settings = url_for(redis_url), producer_settings()
    with Client(url, settings=settings, name=settings.name_at(url, "cli")) as client:
        yield client


@contextmanager
def open_redis(redis_url: str | None) -> Iterator[redis.Redis]:
    """A connection, its errors named; raises ConfigError, RedisUnavailable."""
    from producer.connection import connect, named_errors

    url = url_for(redis_url)
    with connect(url) as connection, named_errors(url):
        connection.ping()
        yield connection


def live_workers(connection: redis.Redis, model: str) -> int:
    """How many workers serve `model` now; raises redis-py's errors."""
    from producer import keys
    from producer.link import Link

    with closing(Link(connection)) as link:
        count: int = link.script("alive", (keys.model_keys(model).workers,), [])
    return count


def warn_if_unserved(redis_url: str | None, model: str) -> None:
    """One line on stderr if no live worker serves `model`; raises RedisUnavailable."""
    with open_redis(redis_url) as connection:
        workers = live_workers(connection, model)
    if not workers:
        typer.secho(
            f"warning: no worker serves model {model!r} now; its tasks wait for one until their "
            "deadline",
            fg=typer.colors.YELLOW,
            err=True,
        )
