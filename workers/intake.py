"""From a stream entry to a held task, or to the answer that it cannot be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from producer import keys
from producer.entries import Entry, Settlement
from producer.errors import (
    BatchTimeout,
    Cancelled,
    CorruptMessage,
    DeadlineExceeded,
    MessageTooLarge,
    PathNotAllowed,
    PoisonTask,
    TrtqError,
    WireError,
    WrongInputName,
)
from producer.inbox import REPLY_TTL_S
from producer.inputs import check_tensors
from producer.letters import encode_letter
from producer.spec import ModelSpec
from producer.task import InferenceTask, Reply, client_of
from producer.wire import decode_task, encode_reply, sender_of
from workers.batcher import Held, ShapeKey
from workers.incidents import (
    CANCELLED,
    CORRUPT,
    EXPIRED,
    FAILED,
    POISONED,
    REFUSED,
    Incidents,
    task_name,
)
from workers.metrics import Counters
from workers.rows import check_nan
from workers.stages import QUEUE_WAIT, Stages
from workers.tracing import NO_TRACING, Tracing, trace_of


class Admitted(NamedTuple):
    """What became of claimed entries: tasks to run, and answers to give without running."""

    held: list[Held]
    settlements: list[Settlement]


class Intake:
    """Decodes and checks entries of one model. `clock` gives ms and never goes back."""

    def __init__(
        self,
        spec: ModelSpec,
        counters: Counters,
        stages: Stages,
        incidents: Incidents,
        clock: Callable[[], float],
        *,
        bulk_allowed: bool,
        max_deliveries: int,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._spec = spec
        self._counters = counters
        self._stages = stages
        self._incidents = incidents
        self._clock = clock
        self._bulk_allowed = bulk_allowed
        self._max_deliveries = max_deliveries
        self._tracing = tracing
        self._reference_key: ShapeKey = tuple(
            (tensor.dtype, tuple(size or 0 for size in tensor.shape)) for tensor in spec.inputs
        )

    def admit(
        self,
        entries: list[Entry],
        redis_now_ms: int,
        cancelled: frozenset[tuple[int, bytes]] = frozenset(),
    ) -> Admitted:
        """Sorts entries into tasks to run and answers. Never raises for what an entry holds."""
        held: list[Held] = []
        settlements: list[Settlement] = []
        waits_ms: list[int] = []
        traced: list[tuple[InferenceTask, int]] = []
        unwanted: list[Held] = []
        late: list[Held] = []
        now_ms = self._clock()
        for entry in entries:
            try:
                task = self._task(entry)
            except TrtqError as failure:
                settlements.append(self._unreadable(entry, failure))
                continue
            waited_ms = redis_now_ms - int(entry.entry_id.partition(b"-")[0])
            waits_ms.append(max(0, waited_ms))
            if task.trace:
                traced.append((task, waits_ms[-1]))
            left_ms = task.ttl_ms - waited_ms if task.ttl_ms else float("inf")
            one = Held(entry, task, (), now_ms, now_ms + left_ms)
            if cancelled and (entry.stream, entry.entry_id) in cancelled:
                unwanted.append(one)
                continue
            if left_ms <= 0:
                late.append(one)
                continue
            try:
                one.alone = self._alone(entry, task)
                one.shape_key = self._check(task)
            except TrtqError as failure:
                settlements.append(self._refused(one, failure))
                continue
            held.append(one)
        settlements += self.cancelled(unwanted, "claimed")
        settlements += self.expired(late, "queued")
        self._stages.observe_many(QUEUE_WAIT, waits_ms)
        if traced:
            self._tracing.queue_waits(traced, redis_now_ms)
        return Admitted(held, settlements)

    def cancelled(self, tasks: list[Held], reason: str) -> list[Settlement]:
        """The answers to cancelled tasks, found when they were `claimed` or while `held`."""
        self._incidents.record(CANCELLED, reason, [held.task.task_id for held in tasks])
        return [
            self._answered(
                held, Cancelled(f"task {held.task.task_id} was cancelled before it was run")
            )
            for held in tasks
        ]

    def expired(self, tasks: list[Held], reason: str) -> list[Settlement]:
        """The answers to tasks that are late: while `queued`, or while `held` by this worker."""
        self._incidents.record(EXPIRED, reason, [held.task.task_id for held in tasks])
        return [
            self._answered(
                held,
                DeadlineExceeded(
                    f"task {held.task.task_id} waited longer than its {held.task.ttl_ms} ms and "
                    "was not run"
                ),
            )
            for held in tasks
        ]

    def _refused(self, held: Held, failure: TrtqError) -> Settlement:
        poison = isinstance(failure, PoisonTask)
        event, reason = (POISONED, "deliveries") if poison else (REFUSED, failure.code)
        self._incidents.record(event, reason, [held.task.task_id], failure.message)
        return self._answered(held, failure)

    def timed_out(self, held: Held, failure: BatchTimeout) -> Settlement:
        """The answer to a task on which the engine did not end."""
        self._incidents.record(FAILED, failure.code, [held.task.task_id], failure.message)
        return self._answered(held, failure)

    def _answered(self, held: Held, failure: TrtqError) -> Settlement:
        """The settlement of a task that is answered without being run."""
        dead = isinstance(failure, PoisonTask | BatchTimeout)
        reply = Reply(held.task.task_id, error_code=failure.code, error_message=failure.message)
        # What its own sender took back has not failed.
        self._counters.failed += not isinstance(failure, Cancelled)
        self._stages.failure(failure.code)
        return Settlement(
            held.entry,
            held.entry.rows,
            client_of(held.task.task_id),
            encode_reply(reply),
            keys.result(held.task.task_id) if held.task.store_s else "",
            held.task.store_s,
            _letter(held.entry, held.task.task_id, failure) if dead else (),
            trace_of(held.task),
            # Dead tasks were run, and too often or too long already; all others were not.
            frees_key=not dead,
        )

    def _task(self, entry: Entry) -> InferenceTask:
        if entry.frame is None:
            raise CorruptMessage("the stream entry has no field 'd'")
        if len(entry.frame) > self._spec.max_task_bytes:
            raise MessageTooLarge(
                f"the task has {len(entry.frame)} bytes, model {self._spec.name!r} takes at most "
                f"{self._spec.max_task_bytes}"
            )
        return decode_task(entry.frame)

    def _unreadable(self, entry: Entry, failure: TrtqError) -> Settlement:
        self._counters.failed += 1
        self._stages.failure(failure.code)
        task_id = sender_of(entry.frame or b"")
        self._incidents.record(CORRUPT, failure.code, [task_name(entry)], failure.message)
        reply = b""
        if task_id is not None:
            reply = encode_reply(
                Reply(task_id, error_code=failure.code, error_message=failure.message)
            )
        # Only what nobody can be told about, or nobody can read, is kept for a look.
        keep = task_id is None or isinstance(failure, WireError)
        letter = _letter(entry, task_id or "", failure) if keep else ()
        client = client_of(task_id) if task_id else None
        # Who waits for a keyed task finds its outcome where results are stored.
        stored = keys.result(task_id) if task_id and entry.key else ""
        return Settlement(
            entry, entry.rows, client, reply, stored, REPLY_TTL_S, letter, frees_key=True
        )

    def _alone(self, entry: Entry, task: InferenceTask) -> bool:
        if entry.deliveries > self._max_deliveries:
            raise PoisonTask(
                f"task {task.task_id} was given to {entry.deliveries} workers, the last time "
                "alone, and none answered: it probably kills its worker"
            )
        return entry.deliveries >= self._max_deliveries

    def _check(self, task: InferenceTask) -> ShapeKey:
        spec = self._spec
        if task.reference is None:
            check_tensors(spec, task.inputs, task.rows)
            if spec.forbid_nan:
                check_nan(spec, task.inputs)
            return tuple([(tensor.dtype, tensor.shape[1:]) for tensor in task.inputs])
        reference = task.reference
        if not self._bulk_allowed:
            raise PathNotAllowed(
                "this worker allows no files: set TRTQ_BULK_ROOTS (trtq worker --bulk-root) to "
                "the folders that bulk jobs may use"
            )
        if not 1 <= task.rows == reference.stop - reference.start <= spec.max_rows_per_task:
            raise CorruptMessage(f"task {task.task_id} has not the rows that it refers to")
        if {n for n, _ in reference.inputs} != {t.name for t in spec.inputs} or {
            n for n, _ in reference.outputs
        } != {t.name for t in spec.outputs}:
            raise WrongInputName(
                f"model {spec.name!r}: a reference names inputs and outputs that differ from its"
            )
        if any(None in tensor.shape for tensor in spec.inputs + spec.outputs):
            raise WrongInputName(
                f"model {spec.name!r} has dynamic dimensions; rows by reference need fixed ones"
            )
        return self._reference_key


def _letter(entry: Entry, task_id: str, failure: TrtqError) -> list[str | bytes]:
    return encode_letter(
        task_id,
        failure.code,
        failure.message,
        entry.stream,
        entry.rows,
        entry.deliveries,
        entry.holders,
        entry.entry_id,
        len(entry.frame or b""),
    )
