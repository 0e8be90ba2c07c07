"""What the slots of one model run now and since when: what the watchdog looks at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from workers.batcher import Held


class Attempt(NamedTuple):
    """One gather, run and scatter under way in a slot's thread."""

    thread: int
    #: What the slot took, and of it what runs now: all, or one task after they failed together.
    batch: list[Held]
    tasks: list[Held]
    started_ms: float


class Attempts:
    """The attempts of one model. `clock` gives ms and never goes back. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[int, Attempt] = {}
        self._abandoned: set[int] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, batch: list[Held]) -> None:
        """The calling slot has taken `batch`. Pair with `end`."""
        thread = threading.get_ident()
        with self._lock:
            self._running[thread] = Attempt(thread, batch, batch, self._clock())

    def restart(self, tasks: list[Held]) -> None:
        """The calling slot now runs `tasks` of its batch: their time begins."""
        thread = threading.get_ident()
        with self._lock:
            batch = self._running[thread].batch
            self._running[thread] = Attempt(thread, batch, tasks, self._clock())

    def end(self) -> bool:
        """The calling slot is done with its batch; False if that was abandoned meanwhile."""
        thread = threading.get_ident()
        with self._lock:
            del self._running[thread]
            if thread in self._abandoned:
                self._abandoned.remove(thread)
                return False
            return True

    def abandon(self, timeout_ms: float) -> list[Attempt]:
        """Gives up what has run for longer than `timeout_ms`; each attempt is returned once."""
        with self._lock:
            now_ms = self._clock()
            overdue = [
                attempt
                for thread, attempt in self._running.items()
                if now_ms - attempt.started_ms > timeout_ms and thread not in self._abandoned
            ]
            self._abandoned.update(attempt.thread for attempt in overdue)
            return overdue

    def forgive(self, ms: float) -> None:
        """Takes `ms` in which the whole process stood still off every attempt's time."""
        with self._lock:
            for thread, attempt in self._running.items():
                self._running[thread] = attempt._replace(started_ms=attempt.started_ms + ms)

    @property
    def hung(self) -> frozenset[int]:
        """Identifiers of threads whose attempt was abandoned and has not ended."""
        with self._lock:
            return frozenset(self._abandoned)
