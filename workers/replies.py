"""Settles what has run: replies, acknowledges and deletes in one step, many batches at once."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import redis

from producer.connection import LINK_ERRORS
from producer.entries import Settled, Settlement
from producer.errors import RedisUnavailable
from workers.inbox import WorkerInbox
from workers.incidents import DEAD_DROPPED, DROPPED, REPLY_RETRIED, Incidents, task_name
from workers.logs import logged_with
from workers.metrics import Counters
from workers.ranges import NO_RANGES, Ranges
from workers.stages import REPLY, Stages
from workers.tracing import NO_TRACING, Tracing

log = logging.getLogger("trtq.replies")

_MOST = 512
_MOST_BYTES = 8 << 20
_IDLE_S = 0.5
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class _Waiting(NamedTuple):
    settlements: list[Settlement]
    #: Redis was asked to take them before.
    tried: bool


class Replier:
    """Sends settlements of one model from its own thread, or at once from the caller's.

    While Redis is away it keeps what it has and tries again: entries stay in the stream until
    their answer is taken. `on_settled` is told every settlement that has left.
    """

    def __init__(
        self,
        inbox: WorkerInbox,
        counters: Counters,
        stages: Stages,
        incidents: Incidents,
        on_settled: Callable[[list[Settlement]], None],
        on_death: Callable[[str], None],
        clock: Callable[[], float] = lambda: time.monotonic() * 1000,
        ranges: Ranges = NO_RANGES,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._inbox = inbox
        self._counters = counters
        self._stages = stages
        self._incidents = incidents
        self._clock = clock
        self._ranges = ranges
        self._tracing = tracing
        self._on_settled = on_settled
        self._on_death = on_death
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(
            target=self._guarded, name=f"trtq-replies-{self._inbox.model}", daemon=True
        )
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def put(self, settlements: list[Settlement], urgent: bool = False) -> None:
        """Takes settlements. An urgent caller sends them itself if nothing else is under way."""
        if urgent and self._queue.empty() and self._sending.acquire(blocking=False):
            try:
                if self._send(settlements, settlements):
                    return
            finally:
                self._sending.release()
            self._queue.put(_Waiting(settlements, tried=True))
        else:
            self._queue.put(_Waiting(settlements, tried=False))

    def wait_sent(self, timeout_ms: float) -> bool:
        """Waits until nothing is under way; False after `timeout_ms`."""
        if not self._sending.acquire(timeout=timeout_ms / 1000):
            return False
        self._sending.release()
        return self._queue.empty()

    def close(self, timeout_s: float = 10.0) -> None:
        """Sends what is left, for at most `timeout_s`, and stops the thread."""
        self._stop.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def _guarded(self) -> None:
        try:
            with logged_with(model=self._inbox.model):
                self._run()
        except BaseException as failure:
            log.exception("the replies of model %r died", self._inbox.model)
            self._on_death(f"the replies of model {self._inbox.model!r} died: {failure!r}")
            raise

    def _run(self) -> None:
        while not (self._stop.is_set() and self._queue.empty()):
            settlements, untried = self._collect()
            if not settlements:
                continue
            failures = 0
            with self._sending:
                while not self._send(settlements, untried):
                    untried = []
                    if self._stop.is_set() and failures > len(_BACKOFF_S):
                        names = [_name(settlement) for settlement in settlements]
                        self._incidents.record(DROPPED, RedisUnavailable.code, names)
                        break
                    self._stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                    failures += 1

    def _collect(self) -> tuple[list[Settlement], list[Settlement]]:
        """What waits, and of it what no call has been made for yet."""
        collected: list[Settlement] = []
        untried: list[Settlement] = []
        size = 0
        try:
            found = self._queue.get(timeout=_IDLE_S)
            while True:
                if found:
                    collected += found.settlements
                    untried += () if found.tried else found.settlements
                    size += sum(len(settlement.reply) for settlement in found.settlements)
                if len(collected) >= _MOST or size >= _MOST_BYTES:
                    break
                found = self._queue.get_nowait()
        except queue.Empty:
            pass
        return collected, untried

    def _send(self, settlements: list[Settlement], untried: list[Settlement]) -> bool:
        """False if Redis is away, which is reported for the `untried` among them."""
        started_ms = self._clock()
        try:
            with self._ranges.open(REPLY, len(settlements)):
                settled = self._inbox.settle(settlements)
        except LINK_ERRORS as failure:
            names = [_name(settlement) for settlement in untried]
            detail = f"Redis took no answer, it waits: {failure}"
            self._incidents.record(REPLY_RETRIED, RedisUnavailable.code, names, detail)
            return False
        except redis.exceptions.ResponseError as failure:
            # Never seen with our own scripts; the leases run out and the tasks are run again.
            names = [_name(settlement) for settlement in settlements]
            self._incidents.record(DROPPED, "redis_refused", names, str(failure))
            settled = Settled(0)
        took_ms = self._clock() - started_ms
        self._stages.observe(REPLY, took_ms)
        self._tracing.replies(settlements, took_ms)
        self._counters.tasks += settled.answered
        self._report(settlements, settled)
        self._on_settled(settlements)
        return True

    def _report(self, settlements: list[Settlement], settled: Settled) -> None:
        names = [_name(settlements[number]) for number in settled.dropped]
        self._incidents.record(DROPPED, "answered_before", names)
        for letter in settled.old_letters:
            self._incidents.record(DEAD_DROPPED, letter.reason, [letter.name], f"was {letter.code}")


def _name(settlement: Settlement) -> str:
    return task_name(settlement.entry)
