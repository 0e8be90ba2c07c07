"""A look at everything an operator asks about: queues and workers."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import redis

from producer import keys
from producer.inbox import Inbox, QueueState
from producer.link import Link


class Status(NamedTuple):
    """Queues by model name, and the workers' own reports (see workers/presence.py)."""

    queues: dict[str, QueueState]
    workers: list[dict[str, Any]]

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        queues = {name: state._asdict() for name, state in self.queues.items()}
        return {"queues": queues, "workers": self.workers}


def look(connection: redis.Redis) -> Status:
    """The state now. Raises redis-py's errors."""
    published: Any = connection.hkeys(keys.MODELS)
    link = Link(connection)
    names = sorted(raw.decode(errors="replace") for raw in published)
    queues = {name: Inbox(link, name).look() for name in names if keys.is_name(name)}
    found = list(connection.scan_iter(match=keys.worker("*"), count=1000))
    reports: Any = connection.mget(found) if found else []
    # None: it expired since the scan.
    workers = [json.loads(report) for report in reports if report is not None]
    return Status(queues, sorted(workers, key=lambda worker: str(worker.get("name"))))
