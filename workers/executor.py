"""The slots of one model and the threads that own them.

A slot is one thread with its own buffers (and on a GPU its own context, stream and events). It
takes a batch from the feed as soon as it is free, so copies and host work of one slot overlap
the compute of another, and nothing waits for the device as a whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from producer.entries import Settlement
from producer.errors import DeviceLost, EngineFailed, TrtqError
from producer.spec import ModelSpec
from workers.attempts import Attempts
from workers.batcher import Held
from workers.engines.base import Engine, Slot
from workers.feed import Feed
from workers.incidents import RETURNED, Incidents
from workers.logs import logged_with
from workers.runner import BatchRunner

log = logging.getLogger("trtq.executor")

_TAKE_MS = 500.0


class Executor:
    """`slots` threads that run batches from `feed` and hand settlements to `deliver`.

    `deliver(settlements, urgent)` is called in the slot's thread; urgent says that nothing else
    waits for the slot. `on_death(reason)` is called if a slot's thread dies. `clock`
    gives ms and never goes back.
    """

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        feed: Feed,
        runner: BatchRunner,
        slots: int,
        deliver: Callable[[list[Settlement], bool], None],
        on_death: Callable[[str], None],
        incidents: Incidents,
        clock: Callable[[], float] = lambda: time.monotonic() * 1000,
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._feed = feed
        self._runner = runner
        self._slots = slots
        self._deliver = deliver
        self._on_death = on_death
        self.attempts = Attempts(clock)
        self._incidents = incidents
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, timeout_s: float = 300.0) -> None:
        """Makes the slots and runs each at every batch size that the engine wants warmed.

        Raises what making or warming a slot raised.
        """
        ready = [threading.Event() for _ in range(self._slots)]
        failures: list[Exception] = []
        for number, event in enumerate(ready):
            thread = threading.Thread(
                target=self._serve,
                args=(event, failures),
                name=f"trtq-slot-{self._spec.name}-{number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        for event in ready:
            if not event.wait(timeout_s):
                self.close(timeout_s=1.0)
                raise EngineFailed(
                    f"model {self._spec.name!r} was not warm after {timeout_s:.0f} s"
                )
        if failures:
            self.close()
            raise failures[0]

    def close(self, timeout_s: float = 30.0) -> bool:
        """Stops the threads after the batches that they run; each frees its slot.

        False if a thread has not ended within `timeout_s`: it still uses the engine. One that
        hangs is not waited for.
        """
        self._stop.set()
        self._feed.close()
        give_up_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident not in self.attempts.hung:
                thread.join(max(0.0, give_up_s - time.monotonic()))
            if thread.is_alive():
                log.error("%s still runs, its memory is not freed", thread.name)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads

    @property
    def hung(self) -> bool:
        """True while a slot runs what the watchdog has given up."""
        return bool(self.attempts.hung)

    @property
    def alive(self) -> bool:
        """True while every slot's thread lives."""
        return bool(self._threads) and all(thread.is_alive() for thread in self._threads)

    def _serve(self, ready: threading.Event, failures: list[Exception]) -> None:
        with logged_with(model=self._spec.name):
            self._own_slot(ready, failures)

    def _own_slot(self, ready: threading.Event, failures: list[Exception]) -> None:
        try:
            slot = self._engine.make_slot()
            slot.activate()
            self._warm(slot)
        except Exception as failure:  # noqa: BLE001 - handed to `start`, which raises it
            failures.append(failure)
            ready.set()
            return
        ready.set()
        try:
            while not self._stop.is_set():
                batch = self._feed.take(_TAKE_MS)
                if batch:
                    settlements = self._run(slot, batch)
                    self._deliver(settlements, self._feed.held_rows == 0)
        except BaseException as failure:
            log.exception("a slot of model %r died", self._spec.name)
            self._on_death(f"a slot of model {self._spec.name!r} died: {failure!r}")
            raise
        finally:
            slot.close()

    def _run(self, slot: Slot, batch: list[Held]) -> list[Settlement]:
        self.attempts.begin(batch)
        lost = False
        try:
            return self._runner.run(slot, batch, self.attempts.restart)
        except DeviceLost as failure:
            lost = True
            names = [held.task.task_id for held in batch]
            self._incidents.record(RETURNED, failure.code, names, failure.message)
            raise
        finally:
            if self.attempts.end() and lost:
                # Not the tasks' fault: they wait again, and the stopping turn hands them back.
                self._feed.add(batch)
            self._feed.finished()

    def _warm(self, slot: Slot) -> None:
        for rows in self._engine.warm_sizes(self._spec.max_batch):
            for tensor in self._spec.inputs:
                shape = tuple(1 if size is None else size for size in tensor.shape)
                slot.input_buffer(tensor.name, rows, shape)[...] = np.zeros((), tensor.dtype)
            try:
                self._engine.run(slot, rows)
            except DeviceLost:
                raise
            except TrtqError as failure:
                # Zeros may be no valid input of this model; real inputs will tell.
                log.warning("warm-up of %r with %d rows: %s", self._spec.name, rows, failure)
