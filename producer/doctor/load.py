"""Load of the doctor's own: random valid inputs of a model, some tasks in flight, until stopped."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from producer.client import Client
from producer.errors import InvalidInput, ResultTimeout, TrtqError
from producer.spec import ModelSpec
from producer.ticket import Ticket

#: Different tasks that are sent again and again: making them must not be the load's own limit.
_VARIANTS = 32
_MOST_VARIANT_BYTES = 64 << 20
_DEADLINE_S = 30.0
_STOP_S = 10.0
_POLL_S = 0.1

Inputs = dict[str, npt.NDArray[Any]]


def random_inputs(
    spec: ModelSpec, rows: int, dynamic_size: int, generator: np.random.Generator
) -> Inputs:
    """Arrays of shape (rows, *row shape) by input name, dynamic axes of `dynamic_size`.

    Floats are from 0 to 1, uint8 from 0 to 255, other integers 0 or 1 (they are often indices).
    """
    found: Inputs = {}
    for tensor in spec.inputs:
        shape = (rows, *(dynamic_size if size is None else size for size in tensor.shape))
        dtype = np.dtype(tensor.dtype)
        if dtype.kind == "f":
            found[tensor.name] = generator.random(shape).astype(dtype)
        else:
            below = 256 if dtype == np.uint8 else 2
            found[tensor.name] = generator.integers(0, below, shape).astype(dtype)
    return found


def default_in_flight(spec: ModelSpec, slots: float, workers: float, task_bytes: int) -> int:
    """Two batches for every slot, in tasks of one row; within a quarter of the queue's limits."""
    wanted = int(2 * spec.max_batch * max(1.0, slots) * max(1.0, workers))
    room = min(spec.queue_max_rows // 4, spec.queue_max_bytes // 4 // max(1, task_bytes))
    return max(1, min(wanted, room, 4096))


class Load:
    """Keeps `in_flight` tasks of `rows` rows under way, at low priority, for `most_s` at most.

    `start` starts a thread, `check` raises what ended it early, `close` ends it.
    """

    def __init__(
        self,
        client: Client,
        spec: ModelSpec,
        *,
        rows: int,
        in_flight: int,
        most_s: float,
        dynamic_size: int = 16,
        seed: int = 0,
    ) -> None:
        self._client = client
        self._spec = spec
        self._rows = rows
        self._in_flight = in_flight
        self._most_s = most_s
        self._dynamic_size = dynamic_size
        self._seed = seed
        self._room = threading.Semaphore(in_flight)
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[str, Ticket] = {}
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.tasks = 0
        self.errors: dict[str, str] = {}

    def start(self) -> None:
        """Makes the inputs and starts. Raises InvalidInput for more rows than a task may hold."""
        if not 1 <= self._rows <= self._spec.max_rows_per_task:
            raise InvalidInput(
                f"--rows {self._rows}: model {self._spec.name!r} takes 1 to "
                f"{self._spec.max_rows_per_task} rows in a task"
            )
        generator = np.random.default_rng(self._seed)
        first = random_inputs(self._spec, self._rows, self._dynamic_size, generator)
        size = max(1, sum(array.nbytes for array in first.values()))
        count = max(1, min(_VARIANTS, _MOST_VARIANT_BYTES // size))
        self._inputs = [first] + [
            random_inputs(self._spec, self._rows, self._dynamic_size, generator)
            for _ in range(count - 1)
        ]
        self._thread = threading.Thread(target=self._run, name="trtq-doctor-load", daemon=True)
        self._thread.start()

    def wait_running(self, timeout_s: float) -> None:
        """Returns once a first answer came; raises what ended the load, or ResultTimeout."""
        give_up_s = time.monotonic() + timeout_s
        while not self._answered.wait(_POLL_S):
            self.check()
            if time.monotonic() > give_up_s:
                raise ResultTimeout(
                    f"model {self._spec.name!r} answered nothing within {timeout_s:g} s of load: "
                    "is a worker of it alive (trtq status)?"
                )

    @property
    def running(self) -> bool:
        """True while tasks are submitted."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raises what ended the load before its time."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stops submitting, waits some seconds for answers, cancels what is still open."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)
        give_up_s = time.monotonic() + _STOP_S
        for ticket in self._tickets():
            try:
                ticket.exception(timeout=max(0.0, give_up_s - time.monotonic()))
            except ResultTimeout:
                ticket.cancel()

    def _tickets(self) -> list[Ticket]:
        with self._lock:
            return list(self._open.values())

    def _run(self) -> None:
        end_s = time.monotonic() + self._most_s
        number = 0
        try:
            while not self._stop.is_set() and time.monotonic() < end_s:
                if not self._room.acquire(timeout=_POLL_S):
                    continue
                inputs = self._inputs[number % len(self._inputs)]
                number += 1
                ticket = self._client.submit(
                    self._spec.name, inputs, priority="low", deadline=_DEADLINE_S
                )
                with self._lock:
                    self._open[ticket.task_id] = ticket
                ticket.add_done_callback(self._ended)
        except Exception as failure:  # noqa: BLE001 - handed to `check`, which raises it
            self._failure = failure

    def _ended(self, ticket: Ticket) -> None:
        failure = ticket.exception(timeout=0)
        with self._lock:
            self._open.pop(ticket.task_id, None)
            self.tasks += 1
            if isinstance(failure, TrtqError) and failure.code not in self.errors:
                self.errors[failure.code] = failure.message
        self._answered.set()
        self._room.release()
