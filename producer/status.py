"""A look at everything an operator asks about: queues and workers."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated, Any, NamedTuple

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from producer import keys
from producer.catalog import name_of, no_name
from producer.errors import CorruptMessage
from producer.inbox import Inbox, QueueState
from producer.link import Link, is_out_of_memory
from producer.quote import quoted
from producer.spec import MAX_COUNT

_Number = Annotated[float, Field(ge=0, le=MAX_COUNT)]


class _Report(BaseModel):
    """What every reader of a worker's report counts on; it may hold more."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(max_length=500)
    node: str = Field(default="", max_length=500)
    host: str = Field(default="?", max_length=500)
    device: str = Field(default="?", max_length=500)
    models: list[Annotated[str, Field(max_length=100)]] = Field(default=[], max_length=10_000)
    pid: int = Field(default=0, ge=0, le=MAX_COUNT)
    tasks_per_s: _Number = 0.0
    rows_per_s: _Number = 0.0
    tasks: _Number = 0
    rows: _Number = 0
    batches: _Number = 0
    failed: _Number = 0
    expired: _Number = 0


class Status(NamedTuple):
    """Queues by model name, and the workers' own reports (see workers/presence.py).

    `unreadable` has a text for each entry in Redis that was left out, being neither.
    """

    queues: dict[str, QueueState]
    workers: list[dict[str, Any]]
    unreadable: list[str] = []

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        queues = {name: state._asdict() for name, state in self.queues.items()}
        return {"queues": queues, "workers": self.workers, "unreadable": self.unreadable}


def look(connection: redis.Redis) -> Status:
    """The state now. Raises redis-py's errors."""
    with closing(Link(connection)) as link:
        return _look(connection, link)


def _look(connection: redis.Redis, link: Link) -> Status:
    fields: Any = connection.hkeys(keys.MODELS)
    queues: dict[str, QueueState] = {}
    unreadable: list[str] = []
    for field in sorted(fields):
        name = name_of(field)
        if name is None:
            unreadable.append(no_name(field))
            continue
        try:
            queues[name] = Inbox(link, name).look()
        except redis.exceptions.ResponseError as failure:
            if is_out_of_memory(failure) or "WRONGTYPE" not in str(failure):
                raise
            unreadable.append(f"the queue of model {name!r}: {str(failure)[:200]}")
    found = sorted(connection.scan_iter(match=keys.worker("*"), count=1000))
    reports: Any = connection.mget(found) if found else []
    workers: list[dict[str, Any]] = []
    for key, report in zip(found, reports, strict=True):
        if report is None:  # it expired since the scan
            continue
        try:
            workers.append(read_report(report))
        except CorruptMessage as failure:
            unreadable.append(f"{quoted(key)}: {failure.message}")
    return Status(queues, sorted(workers, key=lambda worker: str(worker["name"])), unreadable)


def read_report(raw: bytes | str) -> dict[str, Any]:
    """A worker's report as it wrote it; raises CorruptMessage."""
    try:
        _Report.model_validate_json(raw)
        found: dict[str, Any] = json.loads(raw)
    except (ValueError, RecursionError) as failure:
        said = f"{failure.error_count()} errors" if isinstance(failure, ValidationError) else ""
        raise CorruptMessage(f"no worker's report {said}".strip()) from None
    return found
