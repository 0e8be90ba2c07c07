"""Queues and workers as Prometheus metrics, read from Redis whenever Prometheus asks."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import redis
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from producer.catalog import Catalog
from producer.connection import PASSING_ERRORS
from producer.errors import Unavailable
from producer.events import read_events
from producer.inbox import QueueState
from producer.keys import PRIORITIES
from producer.link import Link
from producer.status import Status, look

log = logging.getLogger("trtq.exporter")


class QueueCollector(Collector):
    """Metrics of every model's queue. A Redis that does not answer gives `trtq_redis_up 0`."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._catalog = Catalog(connection, 0.0, time.monotonic)

    def collect(self) -> Iterable[Metric]:
        """All metrics now."""
        up = 1.0
        found: list[Metric] = []
        try:
            info: Any = self._redis.info()
            found += _server(info)
            found += _queues(look(self._redis))
            found += self._limits()
            found += self._events()
        except PASSING_ERRORS as failure:
            log.warning("Redis does not answer: %s", failure)
            found, up = [], 0.0
        yield GaugeMetricFamily("trtq_redis_up", "1 while Redis answers.", value=up)
        yield from found

    def _limits(self) -> Iterator[Metric]:
        most = GaugeMetricFamily(
            "trtq_queue_max_rows", "Rows that the model's queue takes.", labels=["model"]
        )
        for spec in self._catalog.all():
            most.add_metric([spec.name], spec.queue_max_rows)
        yield most

    def _events(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "trtq_queue_events",
            "What happened to tasks where no worker saw it: refused, cancelled (unclaimed), "
            "purged, unanswered, vanished; dead letters requeued or dropped by an operator.",
            labels=["model", "event", "reason"],
        )
        with closing(Link(self._redis)) as link:
            for spec in self._catalog.all():
                for (event, reason), count in sorted(read_events(link, spec.name).items()):
                    events.add_metric([spec.name, event, reason], count)
        yield events


def _server(info: dict[str, Any]) -> Iterator[Metric]:
    cpu_s = float(info.get("used_cpu_user", 0)) + float(info.get("used_cpu_sys", 0))
    yield CounterMetricFamily("trtq_redis_cpu_seconds", "Processor time of Redis.", value=cpu_s)
    for name, key, text in (
        ("memory_used_bytes", "used_memory", "Memory that Redis uses."),
        ("memory_max_bytes", "maxmemory", "Redis' own limit; 0: none."),
        ("clients", "connected_clients", "Connections to Redis."),
        ("evicted_keys", "evicted_keys", "Keys that Redis threw away; must stay 0."),
    ):
        yield GaugeMetricFamily(f"trtq_redis_{name}", text, value=float(info.get(key, 0)))


def _queues(status: Status) -> Iterator[Metric]:
    tasks = GaugeMetricFamily(
        "trtq_queue_tasks",
        "Tasks in the queue, also those that workers hold.",
        labels=["model", "priority"],
    )
    ages = GaugeMetricFamily(
        "trtq_queue_oldest_task_age_seconds",
        "Age of the oldest task.",
        labels=["model", "priority"],
    )
    for model, queue in status.queues.items():
        depths = (queue.high, queue.normal, queue.low)
        for priority, depth, age in zip(PRIORITIES, depths, queue.oldest_ages_ms, strict=True):
            tasks.add_metric([model, priority], depth)
            ages.add_metric([model, priority], age / 1000)
    yield from (tasks, ages)
    wanted = [
        ("claimed_tasks", "Tasks that workers hold.", lambda q: q.claimed),
        ("rows", "Rows in the queue.", lambda q: q.rows),
        ("bytes", "Bytes of messages in the queue.", lambda q: q.bytes),
        ("bells", "Bells on their way.", lambda q: q.bells),
        ("turns", "Turns that run.", lambda q: q.turns),
        ("workers", "Live workers of the model.", lambda q: q.workers),
        ("dead_tasks", "Dead letters: poison tasks and unreadable messages.", lambda q: q.dead),
    ]
    for name, text, read in wanted:
        family = GaugeMetricFamily(f"trtq_queue_{name}", text, labels=["model"])
        for model, queue in status.queues.items():
            family.add_metric([model], _read(read, queue))
        yield family
    devices = Counter(str(worker.get("device", "?")) for worker in status.workers)
    workers = GaugeMetricFamily("trtq_workers", "Live workers by device.", labels=["device"])
    for device, count in sorted(devices.items()):
        workers.add_metric([device], count)
    yield workers


def _read(read: Any, queue: QueueState) -> float:
    return float(read(queue))


class Exporter:
    """Serves the metrics over HTTP. Port 0 takes a free one; `port` says which."""

    def __init__(self, connection: redis.Redis, host: str, port: int) -> None:
        self._redis = connection
        self._host = host
        self.port = port
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Binds the port; raises Unavailable if it is taken."""
        registry = CollectorRegistry()
        registry.register(QueueCollector(self._redis))
        try:
            server, thread = start_http_server(self.port, self._host, registry)
        except (OSError, OverflowError) as failure:
            raise Unavailable(
                f"the exporter's port {self._host}:{self.port} cannot be bound ({failure}): "
                "give another --port"
            ) from failure
        self._server, self._thread = server, thread
        self.port = server.server_address[1]

    def wait(self) -> None:
        """Returns when the serving thread has ended, which happens at `close` only."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Frees the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
