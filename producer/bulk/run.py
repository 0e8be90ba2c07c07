"""One run of a bulk job: a window of tasks by reference, their ends noted as they come."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from producer.bulk.journal import Journal
from producer.bulk.plan import ChunkPlan
from producer.bulk.sinks import ErrorList, OutputFiles
from producer.bulk.sources import Source
from producer.errors import (
    ClientClosed,
    RedisUnavailable,
    ResultTimeout,
    TaskFailed,
    TrtqError,
    Unavailable,
    UnknownModel,
)
from producer.spec import ModelSpec
from producer.task import RowReference
from producer.ticket import Ticket

log = logging.getLogger("trtq.bulk")

#: A chunk that ended because Redis or the queue was not available is sent this often in all.
_ATTEMPTS = 3
#: How long after a task's deadline its ticket must have ended.
_ANSWER_MARGIN_S = 60.0
_SYNC_EVERY_S = 10.0
_TICK_S = 1.0
#: How long a job that ends early waits for chunks that a worker has begun.
_DRAIN_S = 10.0
#: The same after Ctrl-C, and without Redis, which answers would come through.
_SHORT_DRAIN_S = 1.0


class BulkProgress(NamedTuple):
    """How far a job is. `rows_done` counts every row that has ended, failed and resumed too."""

    rows_done: int
    rows_total: int
    failed: int
    elapsed_s: float
    resumed_rows: int


class BulkSummary(NamedTuple):
    """What a job did. `rows_per_s` counts the rows of this run only."""

    rows: int
    failed: int
    seconds: float
    rows_per_s: float
    tasks: int
    output_paths: tuple[Path, ...]
    errors_path: Path | None
    resumed_rows: int


class RunOptions(NamedTuple):
    """How to run: see `run_bulk`. `fresh`: nothing of an earlier run is in the output."""

    window: int
    priority: str
    deadline_s: float
    redis_patience_s: float
    progress: Callable[[BulkProgress], None] | None
    fresh: bool
    clock: Callable[[], float]
    sleep: Callable[[float], None]


class ReferenceClient(Protocol):
    """What a job needs of `Client`."""

    def spec(self, model: str) -> ModelSpec:
        """The model's published spec, asked of Redis unless that was done just now."""

    def submit_reference(
        self,
        model: str,
        reference: RowReference,
        *,
        priority: str = ...,
        timeout: float | None = ...,
        deadline: float | None = ...,
    ) -> Ticket:
        """A task whose rows the worker reads and writes itself."""


class Outage:
    """How long Redis has been away without a break; ends the job after `patience_s`."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since_s: float | None = None

    @property
    def open(self) -> bool:
        """True while Redis is away as far as is known."""
        return self._since_s is not None

    def over(self) -> None:
        """Redis answered."""
        self._since_s = None

    def failed(self, error: RedisUnavailable) -> None:
        """Redis did not answer; raises RedisUnavailable once the patience is used up."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
            log.warning("bulk job waits: %s", error)
        if now_s - self._since_s >= self._patience_s:
            raise RedisUnavailable(
                f"the bulk job stopped after {self._patience_s:g} s without Redis: "
                f"{error.message}; once it runs again, resume the job (--resume goes on from here)"
            ) from error


class BulkRun:
    """One run of a job whose files are open. Everything but tickets' callbacks is one thread."""

    def __init__(
        self,
        client: ReferenceClient,
        spec: ModelSpec,
        source: Source,
        output: OutputFiles,
        journal: Journal,
        plan: ChunkPlan,
        errors: ErrorList,
        options: RunOptions,
    ) -> None:
        self._client = client
        self._spec = spec
        self._source = source
        self._output = output
        self._journal = journal
        self._plan = plan
        self._errors = errors
        self._options = options
        self._clock = options.clock
        self._sleep = options.sleep
        self._outage = Outage(options.redis_patience_s, options.clock)
        self._inputs = tuple((name, str(path)) for name, path in source.paths.items())
        self._outputs = tuple((name, str(path)) for name, path in output.paths.items())
        self._under_way: dict[str, tuple[Ticket, int, int]] = {}
        self._again: deque[tuple[int, int]] = deque()
        self._ended: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._ended_rows = 0
        self._tasks = 0

    def run(self) -> BulkSummary:
        """Until every chunk has ended."""
        self._started = self._synced = self._heard = self._clock()
        self._resumed = self._plan.done_rows
        self._report()
        try:
            pending = self._plan.pending()
            while True:
                self._fill(pending)
                if not self._under_way:
                    break
                self._take_one()
                if self._clock() - self._synced >= _SYNC_EVERY_S:
                    self._sync()
            self._source.check_unchanged()
        except BaseException as failure:
            self._abandon(failure)
            raise
        return self._finish()

    def _fill(self, pending: Iterator[int]) -> None:
        while len(self._under_way) < self._options.window:
            if self._again:
                chunk, attempt = self._again.popleft()
                self._sleep(0.5 * attempt)
            else:
                chunk, attempt = next(pending, -1), 0
                if chunk < 0:
                    return
            ticket = self._submit(chunk)
            self._under_way[ticket.task_id] = (ticket, chunk, attempt)
            ticket.add_done_callback(self._ended.put)
            self._tasks += 1

    def _submit(self, chunk: int) -> Ticket:
        start, stop = self._plan.range(chunk)
        reference = RowReference(self._inputs, self._outputs, start, stop)
        give_up_s, pause_s = self._clock() + self._options.redis_patience_s, 0.1
        while True:
            try:
                ticket = self._client.submit_reference(
                    self._spec.name,
                    reference,
                    priority=self._options.priority,
                    timeout=self._options.deadline_s,
                    deadline=self._options.deadline_s,
                )
            except RedisUnavailable as error:
                self._outage.failed(error)
            except Unavailable as error:
                if isinstance(error, ClientClosed) or self._clock() >= give_up_s:
                    raise
                log.warning("bulk job waits: %s", error)
            else:
                self._outage.over()
                return ticket
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    def _check_redis(self) -> None:
        """Raises RedisUnavailable if Redis has been away for too long."""
        try:
            self._client.spec(self._spec.name)
        except RedisUnavailable as error:
            self._outage.failed(error)
        except UnknownModel:
            # It answers: it was restarted without data, and no worker has published yet.
            self._outage.over()
        else:
            self._outage.over()

    def _take_one(self) -> None:
        try:
            ticket = self._ended.get(timeout=_TICK_S)
        except queue.Empty:
            if self._clock() - self._heard > self._options.deadline_s + _ANSWER_MARGIN_S:
                raise ResultTimeout(
                    f"model {self._spec.name!r}: none of {len(self._under_way)} tasks was answered "
                    "or failed by its deadline; resume the job"
                ) from None
            self._check_redis()
            self._report()
            return
        self._heard = self._clock()
        if self._outage.open:
            # Tickets end without Redis too, at their deadline.
            self._check_redis()
        _, chunk, attempt = self._under_way.pop(ticket.task_id)
        start, stop = self._plan.range(chunk)
        try:
            row_errors = ticket.result(0)
        except TaskFailed as failure:
            self._failed(start, stop, failure)
        except Unavailable as failure:
            if isinstance(failure, ClientClosed):
                raise
            if attempt + 1 < _ATTEMPTS:
                self._again.append((chunk, attempt + 1))
                return
            self._failed(start, stop, failure)
        else:
            if row_errors:
                self._errors.add(row_errors)
            else:
                self._done(chunk)
        self._ended_rows += stop - start
        self._report()

    def _done(self, chunk: int) -> None:
        # The worker answers after its write, so the rows are in the output now.
        self._plan.mark_done(chunk)
        self._journal.done(chunk)

    def _failed(self, start: int, stop: int, failure: TrtqError) -> None:
        self._output.mark_missing(start, stop)
        self._errors.add_chunk(start, stop, failure)

    def _sync(self) -> None:
        self._output.sync()
        self._journal.sync()
        self._synced = self._clock()

    def _report(self) -> None:
        if self._options.progress is not None:
            self._options.progress(
                BulkProgress(
                    self._resumed + self._ended_rows,
                    self._plan.rows,
                    self._errors.rows,
                    self._clock() - self._started,
                    self._resumed,
                )
            )

    def _finish(self) -> BulkSummary:
        failed = self._errors.rows
        if failed:
            self._sync()
        else:
            self._output.sync()
            self._journal.finish()
        seconds = self._clock() - self._started
        return BulkSummary(
            rows=self._plan.rows,
            failed=failed,
            seconds=seconds,
            rows_per_s=self._ended_rows / seconds if seconds > 0 else 0.0,
            tasks=self._tasks,
            output_paths=tuple(self._output.paths.values()),
            errors_path=self._errors.path if failed else None,
            resumed_rows=self._resumed,
        )

    def _abandon(self, failure: BaseException) -> None:
        """Takes back what no worker has begun, waits shortly for the rest, notes what is done."""
        try:
            for ticket, _, _ in self._under_way.values():
                ticket.cancel()
        except Unavailable as error:
            log.warning("open tasks could not be cancelled: %s", error)
        orderly = isinstance(failure, Exception) and not isinstance(failure, RedisUnavailable)
        end = self._clock() + (_DRAIN_S if orderly else _SHORT_DRAIN_S)
        try:
            while self._under_way:
                ticket = self._ended.get(timeout=max(0.0, end - self._clock()))
                _, chunk, _ = self._under_way.pop(ticket.task_id)
                if ticket.exception(0) is None and not ticket.result(0):
                    self._done(chunk)
        except queue.Empty:
            log.warning("%d tasks were left to the workers", len(self._under_way))
        except TrtqError as error:
            log.warning("the job's state could not be completed: %s", error)
        if orderly and self._options.fresh and not self._plan.done_rows and not self._errors.rows:
            # Nothing worth resuming: leave no empty output in the way of the next try.
            self._output.remove()
            self._journal.remove()
            return
        try:
            self._sync()
        except TrtqError as error:
            log.warning("the job's state could not be completed: %s", error)
