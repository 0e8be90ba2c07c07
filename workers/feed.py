"""Between the turn that claims and the slots that run: what is held, and who may take it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from workers.batcher import Held, choose


class Feed:
    """Held tasks of one model. The turn adds; slot threads take batches as soon as one is ready.

    `clock` gives ms and never goes back. Thread-safe.
    """

    def __init__(self, max_batch: int, max_delay_ms: float, clock: Callable[[], float]) -> None:
        self._max_batch = max_batch
        self._max_delay_ms = max_delay_ms
        self._clock = clock
        lock = threading.Lock()
        # Apart, so that a slot that takes wakes the turn and not the other slots.
        self._offered = threading.Condition(lock)
        self._taken = threading.Condition(lock)
        self._held: list[Held] = []
        self._held_rows = 0
        self._running = 0
        self._busy_ms = 0.0
        self._busy_since_ms = 0.0
        self._awaited_rows = -1
        self._closed = False

    @property
    def held_rows(self) -> int:
        """Rows that wait for a slot."""
        return self._held_rows

    @property
    def running(self) -> int:
        """Slots that run a batch now."""
        return self._running

    @property
    def busy_ms(self) -> float:
        """Time in ms during which at least one slot ran a batch."""
        with self._taken:
            running_ms = self._clock() - self._busy_since_ms if self._running else 0.0
            return self._busy_ms + running_ms

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing runs."""
        with self._taken:
            return not self._held and not self._running

    def add(self, tasks: Iterable[Held]) -> None:
        """Gives tasks to the slots."""
        with self._offered:
            for task in tasks:
                self._held.append(task)
                self._held_rows += task.rows
            self._offered.notify_all()

    def take(self, timeout_ms: float) -> list[Held]:
        """A batch for the calling slot, or nothing after `timeout_ms`. Pair with `finished`."""
        with self._offered:
            give_up_ms = self._clock() + timeout_ms
            while not self._closed:
                now_ms = self._clock()
                choice = choose(
                    self._held,
                    now_ms,
                    max_batch=self._max_batch,
                    max_delay_ms=self._max_delay_ms,
                    idle=self._running == 0,
                )
                if choice.batch:
                    self._remove(choice.batch)
                    if not self._running:
                        self._busy_since_ms = now_ms
                    self._running += 1
                    return choice.batch
                wake_ms = min(give_up_ms, choice.wake_ms or give_up_ms)
                if now_ms >= give_up_ms:
                    return []
                self._offered.wait(max(0.0, wake_ms - now_ms) / 1000)
            return []

    def finished(self) -> None:
        """The calling slot has run what it took."""
        with self._taken:
            self._running -= 1
            if not self._running:
                self._busy_ms += self._clock() - self._busy_since_ms
                self._taken.notify_all()
                self._offered.notify_all()

    def wait_at_most(self, rows: int, timeout_ms: float) -> bool:
        """Waits until at most `rows` rows wait for a slot; False after `timeout_ms`.

        One thread at a time.
        """
        with self._taken:
            self._awaited_rows = rows
            try:
                return self._taken.wait_for(
                    lambda: self._held_rows <= rows or self._closed, timeout_ms / 1000
                )
            finally:
                self._awaited_rows = -1

    def wait_idle(self, timeout_ms: float) -> bool:
        """Waits until nothing waits and nothing runs; False after `timeout_ms`."""
        with self._taken:
            return self._taken.wait_for(
                lambda: not self._held and not self._running, timeout_ms / 1000
            )

    def withdraw(self, unwanted: Callable[[Held], bool]) -> list[Held]:
        """Takes back what waits and is unwanted."""
        with self._taken:
            found = [task for task in self._held if unwanted(task)]
            if found:
                self._remove(found)
            return found

    def close(self) -> None:
        """Lets every waiter go; what is held stays held by nobody."""
        with self._taken:
            self._closed = True
            self._taken.notify_all()
            self._offered.notify_all()

    def _remove(self, tasks: list[Held]) -> None:
        if len(tasks) == len(self._held):
            self._held.clear()
        else:
            gone = set(map(id, tasks))
            self._held = [task for task in self._held if id(task) not in gone]
        self._held_rows -= sum(task.rows for task in tasks)
        # A waiter that is woken for every batch costs the slots as much as a small batch does.
        if not self._held or self._held_rows <= self._awaited_rows:
            self._taken.notify_all()
