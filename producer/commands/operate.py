"""`trtq status` and `trtq purge`: the operator's look at the queues, and their emptying."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import redis
import typer

from producer import keys
from producer.commands.common import DEFAULT_URL, RedisUrl, connected, console, reported
from producer.errors import WireError

if TYPE_CHECKING:
    from rich.console import Group

_REFRESH_S = 1.0
_PURGE_COUNT = 100


@reported
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    redis_url: RedisUrl = DEFAULT_URL,
) -> None:
    """Shows every model's queue and every worker."""
    screen = console()
    with connected(redis_url) as connection:
        if not watch:
            screen.print(_tables(connection))
            return
        from rich.live import Live

        try:
            with Live(_tables(connection), console=screen, auto_refresh=False) as live:
                while True:
                    time.sleep(_REFRESH_S)
                    live.update(_tables(connection), refresh=True)
        except KeyboardInterrupt:
            return


@reported
def purge(
    model: Annotated[str, typer.Argument(help="Name of a published model.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    redis_url: RedisUrl = DEFAULT_URL,
) -> None:
    """Removes MODEL's waiting tasks; their senders get Cancelled. Tasks in work go on."""
    from producer.catalog import Catalog
    from producer.inbox import Inbox

    with connected(redis_url) as connection:
        Catalog(connection, 0, time.monotonic).spec(model)
        inbox = Inbox(connection, model)
        state = inbox.look()
        waiting = max(0, state.high + state.normal + state.low - state.claimed)
        if not yes:
            typer.confirm(f"Remove about {waiting} waiting tasks of {model!r}?", abort=True)
        removed = 0
        # What is added meanwhile is not the operator's to wait for: stop at what there was.
        while removed < waiting:
            frames = inbox.purge(_PURGE_COUNT)
            if not frames:
                break
            answer_cancelled(connection, model, frames)
            removed += len(frames)
    typer.echo(f"{removed} tasks of {model!r} removed")


def answer_cancelled(connection: redis.Redis, model: str, frames: list[bytes]) -> None:
    """Tells the senders of purged frames, and their stored results, that they are cancelled.

    A frame that names no sender is dropped. Raises redis-py's errors.
    """
    from producer.inbox import REPLY_TTL_S
    from producer.task import Reply, client_of
    from producer.wire import decode_task, encode_reply, sender_of

    pipe = connection.pipeline(transaction=False)
    for frame in frames:
        task_id = sender_of(frame)
        if task_id is None:
            continue
        message = f"task {task_id} was removed from the queue of {model!r} by an operator"
        reply = encode_reply(Reply(task_id, error_code="cancelled", error_message=message))
        stream = keys.reply(client_of(task_id))
        pipe.xadd(stream, {b"d": reply})
        pipe.expire(stream, REPLY_TTL_S)
        try:
            store_s = decode_task(frame).store_s
        except WireError:
            store_s = 0  # Its sender is told; what else it asked for cannot be read.
        if store_s:
            pipe.set(keys.result(task_id), reply, ex=store_s)
    pipe.execute()


def workers_of(connection: redis.Redis) -> list[dict[str, Any]]:
    """The heartbeats of all live workers, by name."""
    names = sorted(connection.scan_iter(match=keys.worker("*"), count=1000))
    documents = [json.loads(raw) for raw in (connection.mget(names) if names else []) if raw]
    return [document for document in documents if isinstance(document, dict)]


def mean_batch(worker: dict[str, Any]) -> float:
    """Rows per batch of a worker since its start; 0 before its first batch."""
    return float(worker["rows"] / worker["batches"]) if worker.get("batches") else 0.0


def _tables(connection: redis.Redis) -> Group:
    from rich.console import Group

    return Group(_model_table(connection), _worker_table(connection))


def _model_table(connection: redis.Redis) -> Any:
    from rich.table import Table

    from producer.inbox import Inbox

    fields = "high normal low claimed rows bytes oldest_age_ms turns bells workers dead".split()
    table = Table("model", *(field.replace("_", " ") for field in fields), title="Queues")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in sorted(connection.hkeys(keys.MODELS)):
        model = name.decode() if isinstance(name, bytes) else name
        state = Inbox(connection, model).look()
        table.add_row(model, *(str(getattr(state, field)) for field in fields))
    return table


def _worker_table(connection: redis.Redis) -> Any:
    from rich.table import Table

    table = Table(
        "worker", "device", "host", "pid", "models", "tasks", "failed", "tasks/s", "rows/s",
        "mean batch", title="Workers",
    )  # fmt: skip
    for column in table.columns[5:]:
        column.justify = "right"
    for worker in workers_of(connection):
        table.add_row(
            *(str(worker.get(field, "")) for field in ("name", "device", "host", "pid")),
            ", ".join(worker.get("models", ())),
            *(str(worker.get(f, "")) for f in ("tasks", "failed", "tasks_per_s", "rows_per_s")),
            f"{mean_batch(worker):.1f}",
        )
    return table
