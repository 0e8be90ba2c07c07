"""The trtq worker under test, started as `trtq worker` starts it, and what it publishes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis
import yaml

from benchmarks.processes import Service
from producer import keys
from producer.connection import connect
from producer.inbox import Inbox
from producer.link import Link
from workers.devices import parse_devices
from workers.launch import make_plans

_BEAT_S = 10.0


class Totals(NamedTuple):
    """Tasks, rows and batches of the worker since its start."""

    tasks: int
    rows: int
    batches: int


class TrtqWorker:
    """A running worker of one model: a process for each device and copy; `service` is the first."""

    def __init__(self, services: Sequence[Service], connection: redis.Redis) -> None:
        self.services = list(services)
        self.service = self.services[0]
        self._redis = connection

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return sum(service.cpu_s() for service in self.services)

    def totals(self, least_rows: int = 0) -> Totals:
        """Its published totals, once they count `least_rows`; raises TimeoutError."""
        give_up_s = time.monotonic() + _BEAT_S
        while True:
            total = self._read()
            if total.rows >= least_rows:
                return total
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"worker totals {total} do not reach {least_rows} rows")
            for service in self.services:
                service.check()
            time.sleep(0.05)

    def _read(self) -> Totals:
        documents: list[dict[str, Any]] = []
        for key in self._redis.scan_iter(keys.worker("*"), count=1000):
            value = self._redis.get(key)
            if isinstance(value, bytes):
                documents.append(json.loads(value))
        return Totals(*(sum(d[name] for d in documents) for name in Totals._fields))


@contextmanager
def trtq_worker(
    url: str,
    folder: Path,
    model: dict[str, Any],
    bulk_root: Path | None = None,
    devices: str = "cpu",
    copies: int = 1,
    ready_s: float = 60.0,
    metrics_port: int = 0,
    env: Mapping[str, str] | None = None,
    more_models: Sequence[dict[str, Any]] = (),
    module: str = "celery",
) -> Iterator[TrtqWorker]:
    """A worker that serves `model` (the fields of its YAML file) until the block ends.

    It serves `more_models` too, and has `env` beside its own environment. `module` is run with
    Celery's arguments. `copies` workers share the `devices`. The first process publishes its
    metrics at `metrics_port`.
    """
    models = folder / "models"
    models.mkdir(exist_ok=True)
    for one in (model, *more_models):
        (models / f"{one['name']}.yaml").write_text(yaml.safe_dump(one))
    plans = [
        plan
        for copy in range(copies)
        for plan in make_plans(
            parse_devices(devices),
            redis_url=url,
            models=[models],
            bulk_roots=[bulk_root] if bulk_root else [],
            name=f"copy{copy}" if copies > 1 else "",
            infer_threads=0,
            loglevel="warning",
        )
    ]
    connection = connect(url)
    with ExitStack() as stack:
        services = []
        for number, plan in enumerate(plans):
            port = 0 if number else metrics_port
            variables = {**plan.env, "TRTQ_METRICS_PORT": str(port), **(env or {})}
            # The plan's command is `python -m celery ...`.
            command = [*plan.command[:2], module, *plan.command[3:]]
            name = "trtq-worker" + (f"-{plan.name}" if number else "")
            services.append(stack.enter_context(Service(name, command, folder, variables)))
        inbox = Inbox(Link(connection), model["name"])

        def all_ready() -> bool:
            for service in services:
                service.check()
            return inbox.look().workers >= len(services)

        services[0].wait_until(all_ready, ready_s)
        yield TrtqWorker(services, connection)
    connection.close()
