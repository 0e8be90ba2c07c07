"""Notices a run of an engine that does not end. One thread per process.

A call into native code cannot be interrupted, so the process has to be replaced. Before it ends,
nobody is left waiting: a task that hung alone is answered, all others are handed back.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from workers.attempts import Attempt, Attempts

log = logging.getLogger("trtq.watchdog")

_MOST_INTERVAL_MS = 1000.0


class WatchedModel(Protocol):
    """What the watchdog asks of a loaded model."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def batch_timeout_ms(self) -> float | None:
        """How long one run may take; None: as long as it likes."""

    @property
    def attempts(self) -> Attempts:
        """What its slots run."""

    def give_up(self, hung: Sequence[Attempt], *, alone: bool) -> None:
        """Answers or hands back what hangs. `alone`: nothing else ran in this process."""


class FreezeGuard:
    """Ends the process with 1 if no thread of it runs for `timeout_s`; None never does.

    Native code that hangs without letting go of the interpreter's lock stops the watchdog too.
    Python's own fault handler needs no lock: it writes every thread's stack and exits.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def postpone(self) -> None:
        """Starts the time anew."""
        if self._timeout_s is not None:
            output = sys.__stderr__ or 2
            faulthandler.dump_traceback_later(self._timeout_s, file=output, exit=True)

    def cancel(self) -> None:
        """Ends the guard."""
        if self._timeout_s is not None:
            faulthandler.cancel_dump_traceback_later()


class Watchdog:
    """Looks at all `models` several times within the shortest timeout, at least each second.

    `clock` gives ms and never goes back. `on_hang(reason)` ends the process warmly; it is called
    before the hung tasks are given up, so that this worker does not take them back.
    `on_death(reason)` is called if the thread dies. `guard` is postponed with every look.
    """

    def __init__(
        self,
        models: Sequence[WatchedModel],
        clock: Callable[[], float],
        on_hang: Callable[[str], None],
        on_death: Callable[[str], None],
        guard: FreezeGuard,
    ) -> None:
        self._models = models
        self._clock = clock
        self._on_hang = on_hang
        self._on_death = on_death
        self._guard = guard
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._looked_ms = 0.0

    @property
    def interval_ms(self) -> float:
        """Time between two looks."""
        timeouts_ms = [m.batch_timeout_ms for m in self._models if m.batch_timeout_ms is not None]
        return min([_MOST_INTERVAL_MS, *(timeout_ms / 10 for timeout_ms in timeouts_ms)])

    @property
    def alive(self) -> bool:
        """True while the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the thread."""
        self._looked_ms = self._clock()
        # A run may freeze the process before the first look.
        self._guard.postpone()
        self._thread = threading.Thread(target=self._guarded, name="trtq-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread after what it gives up right now."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        self._guard.cancel()

    def look(self) -> None:
        """Gives up what has run for too long."""
        self._guard.postpone()
        now_ms = self._clock()
        pause_ms = now_ms - self._looked_ms - 2 * self.interval_ms
        self._looked_ms = now_ms
        if pause_ms > 0:
            # This thread stood still, so the others probably did too (a stopped container).
            for model in self._models:
                model.attempts.forgive(pause_ms)
        running = sum(len(model.attempts) for model in self._models)
        for model in self._models:
            if model.batch_timeout_ms is not None:
                hung = model.attempts.abandon(model.batch_timeout_ms)
                if hung:
                    self._give_up(model, model.batch_timeout_ms, hung, alone=running == 1)

    def _give_up(
        self, model: WatchedModel, timeout_ms: float, hung: Sequence[Attempt], *, alone: bool
    ) -> None:
        frames = sys._current_frames()
        for attempt in hung:
            stack = traceback.format_stack(frames.get(attempt.thread))
            log.critical(
                "a slot of model %r hangs here:\n%s",
                model.name,
                "".join(stack),
                extra={"model": model.name},
            )
        tasks = sum(len(attempt.tasks) for attempt in hung)
        self._on_hang(
            f"a run of model {model.name!r} with {tasks} tasks did not end within "
            f"{timeout_ms / 1000:g} s (batch_timeout_s)"
        )
        model.give_up(hung, alone=alone)

    def _guarded(self) -> None:
        try:
            while not self._stop.wait(self.interval_ms / 1000):
                self.look()
        except BaseException as failure:
            log.exception("the watchdog died")
            self._on_death(f"the watchdog died: {failure!r}")
            raise
