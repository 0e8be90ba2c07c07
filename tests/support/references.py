"""A client for bulk jobs without Redis: threads run references as a worker does, with RowFiles."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from producer.errors import TrtqError, UnknownModel
from producer.spec import ModelSpec
from producer.task import Reply, RowError, RowReference
from producer.ticket import Ticket, cancelled
from workers.files import RowFiles

Arrays = dict[str, Any]


class ThreadClient:
    """`spec` and `submit_reference` of a Client.

    `run` maps input arrays to output arrays. `check`, called before, may raise a TrtqError (the
    task's error) or return RowErrors. `refuse`, called at submit, may raise.
    """

    def __init__(
        self,
        spec: ModelSpec,
        roots: list[Path],
        run: Callable[[Arrays], Arrays],
        check: Callable[[RowReference], list[RowError]] = lambda _: [],
        refuse: Callable[[RowReference], None] = lambda _: None,
        threads: int = 2,
    ) -> None:
        self._spec = spec
        self._files = RowFiles(roots)
        self._run = run
        self._check = check
        self._refuse = refuse
        self._pool = ThreadPoolExecutor(threads)
        self._lock = threading.Condition()
        self._numbers = itertools.count()
        self._begun: set[str] = set()
        self.submitted: list[RowReference] = []
        self.most_under_way = 0
        self._under_way = 0

    def close(self) -> None:
        self._pool.shutdown()
        self._files.close()

    def wait_idle(self) -> None:
        """Returns when every submitted task was run."""
        with self._lock:
            assert self._lock.wait_for(lambda: not self._under_way, 30)

    def spec(self, model: str) -> ModelSpec:
        if model != self._spec.name:
            raise UnknownModel(f"no model {model!r}; known: {self._spec.name}")
        return self._spec

    def submit_reference(
        self,
        model: str,
        reference: RowReference,
        *,
        priority: str = "low",
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        self._refuse(reference)
        task_id = f"stub-{next(self._numbers)}"
        ticket = Ticket(task_id, model, 2, False, 0.0, self, threading.Lock())
        self.submitted.append(reference)
        with self._lock:
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
        self._pool.submit(self._execute, ticket, reference)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            if ticket.task_id in self._begun:
                return False
            self._begun.add(ticket.task_id)
            self._under_way -= 1
        return ticket.fail(cancelled(ticket))

    def _execute(self, ticket: Ticket, reference: RowReference) -> None:
        with self._lock:
            if ticket.task_id in self._begun:
                return
            self._begun.add(ticket.task_id)
        try:
            row_errors = self._rows(reference)
            reply = Reply(ticket.task_id, row_errors=tuple(row_errors))
        except TrtqError as error:
            reply = Reply(ticket.task_id, error_code=error.code, error_message=error.message)
        with self._lock:
            self._under_way -= 1
            self._lock.notify_all()
        ticket.answer(reply)

    def _rows(self, reference: RowReference) -> list[RowError]:
        arrays = {}
        rows = reference.stop - reference.start
        paths = dict(reference.inputs)
        for tensor in self._spec.inputs:
            into = np.empty((rows, *(size or 1 for size in tensor.shape)), tensor.dtype)
            self._files.read_rows(paths[tensor.name], reference.start, reference.stop, into, tensor)
            arrays[tensor.name] = into
        errors = self._check(reference)
        outputs = self._run(arrays)
        for tensor in self._spec.outputs:
            array = outputs[tensor.name]
            for error in errors:
                array[error.row - reference.start] = np.nan if array.dtype.kind == "f" else 0
            path = dict(reference.outputs)[tensor.name]
            self._files.write_rows(path, reference.start, array, tensor)
        return errors
