"""`trtq models`, `status` and `purge`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from producer.commands.shared import (
    AsJson,
    Model,
    RedisUrl,
    open_client,
    open_redis,
    stdout,
)

if TYPE_CHECKING:
    from rich.console import RenderableType


def models(as_json: AsJson = False, redis_url: RedisUrl = None) -> None:
    """List the models that workers have published."""
    from producer import keys
    from producer.catalog import read_published
    from producer.quote import printable

    with open_redis(redis_url) as connection:
        specs, unreadable = read_published(connection.hgetall(keys.MODELS))
    for text in unreadable:
        typer.secho(f"left out: {printable(text)}", fg=typer.colors.RED, err=True)
    if as_json:
        typer.echo(json.dumps([spec.model_dump(mode="json") for spec in specs]))
        return
    from producer.commands.tables import models_table

    stdout().print(models_table(specs))


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Show it until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show queues and workers.

    high, normal and low count tasks, also those that workers hold ("running"); oldest is the age
    of the oldest task; dead counts dead letters, see `trtq dead list`. failed counts tasks that
    ended with an error, also expired ones, not those that were cancelled.

    Workers are the processes that serve models. The one for plain Celery clients (trtq.infer)
    serves none; `celery -A workers.app status` lists it.
    """
    if watch:
        _watch(redis_url, interval)
        return
    from producer.status import look

    with open_redis(redis_url) as connection:
        state = look(connection)
    if as_json:
        typer.echo(json.dumps(state.as_document()))
        return
    from producer.commands.tables import status_tables

    stdout().print(status_tables(state))


def _watch(redis_url: str | None, interval: float) -> None:
    from rich.live import Live

    with Live(_look(redis_url), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(_look(redis_url), refresh=True)
        except KeyboardInterrupt:
            return


def _look(redis_url: str | None) -> RenderableType:
    from rich.text import Text

    from producer.commands.tables import status_tables
    from producer.errors import RedisUnavailable
    from producer.status import look

    try:
        with open_redis(redis_url) as connection:
            return status_tables(look(connection))
    except RedisUnavailable as error:
        # Whoever watches wants to see it come back.
        return Text(error.message, style="red")


def purge(
    model: Model,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Remove a model's tasks that no worker holds, and its dead letters.

    The senders of the tasks get Cancelled.
    """
    with open_client(redis_url) as client:
        client.spec(model)
    if not yes:
        typer.confirm(f"Remove all waiting tasks of {model}?", abort=True)
    from producer.purge import purge as purge_queue

    with open_redis(redis_url) as connection:
        removed = purge_queue(connection, model)
    typer.echo(f"{removed:,} tasks removed")
