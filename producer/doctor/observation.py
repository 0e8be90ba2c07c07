"""Samples workers' pages and Redis over some seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import redis

from producer.doctor.pages import Page, checked_url, fetch
from producer.errors import ConfigError, Unavailable
from producer.inbox import QueueState
from producer.status import Status, look

log = logging.getLogger("trtq.doctor")

#: Looks at the queues while a sample is taken.
_LOOKS = 40
_LEAST_PAUSE_S = 0.05


class ServerState(NamedTuple):
    """Redis' own counters (INFO). `cpu_s` is its main thread's, where it tells that apart."""

    at_s: float
    cpu_s: float
    net_bytes: int
    used_memory_bytes: int
    #: 0: no limit.
    max_memory_bytes: int


class Observation(NamedTuple):
    """Everything measured between two moments."""

    before: list[Page]
    #: Of the same workers in the same order.
    after: list[Page]
    #: Looks at the queues in between.
    queues: list[dict[str, QueueState]]
    server_before: ServerState
    server_after: ServerState
    #: Processor time of this process, where it made the load.
    client_cpu_s: float | None
    #: Pages that could not be read.
    missing: list[str]

    @property
    def seconds(self) -> float:
        """Length of the sample."""
        return max(1e-9, self.server_after.at_s - self.server_before.at_s)


def discover(status: Status) -> list[str]:
    """The pages that live workers publish; raises ConfigError if there are workers and none does.

    Without any worker the queues alone can be judged.
    """
    urls = [worker["metrics_url"] for worker in status.workers if worker.get("metrics_url")]
    if status.workers and not urls:
        raise ConfigError(
            f"none of {len(status.workers)} live workers has a metrics port: start them with "
            "--metrics-port 9461 (TRTQ_METRICS_PORT), or give --metrics URL"
        )
    return sorted(map(checked_url, urls))


def read_pages(
    urls: Iterable[str], clock: Callable[[], float], *, strict: bool
) -> tuple[list[Page], list[str]]:
    """Pages, and what could not be read; raises Unavailable for that if `strict` or none could.

    A worker that was just stopped stays published for some seconds, so what was not asked for by
    name may be away.
    """
    pages, missing = [], []
    for url in urls:
        try:
            pages.append(fetch(url, clock()))
        except Unavailable as failure:
            if strict:
                raise
            log.warning("%s", failure)
            missing.append(url)
    if missing and not pages:
        raise Unavailable(f"none of the metrics pages answers: {', '.join(missing)}")
    return pages, missing


def observe(
    connection: redis.Redis,
    urls: Sequence[str],
    seconds: float,
    *,
    strict: bool,
    makes_load: bool = False,
    check: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Observation:
    """Samples for `seconds`. `check()` is called at each look and may raise to end it.

    Raises Unavailable, redis-py's errors, and what `check` raises.
    """
    before, missing = read_pages(urls, clock, strict=strict)
    cpu_before_s = time.process_time()
    server_before = _server(connection, clock())
    queues = []
    pause_s = max(_LEAST_PAUSE_S, seconds / _LOOKS)
    waiter = threading.Event()
    end_s = clock() + seconds
    while (left_s := end_s - clock()) > 0:
        check()
        queues.append(look(connection).queues)
        waiter.wait(min(pause_s, left_s))
    server_after = _server(connection, clock())
    client_cpu_s = time.process_time() - cpu_before_s if makes_load else None
    after, lost = read_pages([page.url for page in before], clock, strict=strict)
    still = {page.url for page in after}
    return Observation(
        [page for page in before if page.url in still],
        after,
        queues,
        server_before,
        server_after,
        client_cpu_s,
        missing + lost,
    )


def _server(connection: redis.Redis, now_s: float) -> ServerState:
    info: Any = connection.info()
    thread = "_main_thread" if "used_cpu_user_main_thread" in info else ""
    cpu_s = sum(float(info.get(f"used_cpu_{part}{thread}", 0)) for part in ("user", "sys"))
    moved = sum(int(info.get(f"total_net_{way}_bytes", 0)) for way in ("input", "output"))
    return ServerState(
        now_s, cpu_s, moved, int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    )
