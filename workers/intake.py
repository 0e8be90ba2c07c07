"""From a stream entry to a held task, or to the answer that it cannot be run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from producer import keys
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
from producer.inbox import Entry, Settlement
from producer.inputs import check_tensors
from producer.spec import ModelSpec
from producer.task import InferenceTask, Reply, client_of
from producer.wire import decode_task, encode_reply, sender_of
from workers.batcher import Held, ShapeKey
from workers.metrics import Counters
from workers.rows import check_nan
from workers.stages import QUEUE_WAIT, Stages


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
        clock: Callable[[], float],
        *,
        bulk_allowed: bool,
        max_deliveries: int,
    ) -> None:
        self._spec = spec
        self._counters = counters
        self._stages = stages
        self._clock = clock
        self._bulk_allowed = bulk_allowed
        self._max_deliveries = max_deliveries
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
        now_ms = self._clock()
        for entry in entries:
            try:
                task = self._task(entry)
            except TrtqError as failure:
                settlements.append(self._unreadable(entry, failure))
                continue
            waited_ms = redis_now_ms - int(entry.entry_id.partition(b"-")[0])
            waits_ms.append(max(0, waited_ms))
            left_ms = task.ttl_ms - waited_ms if task.ttl_ms else float("inf")
            one = Held(entry, task, (), now_ms, now_ms + left_ms)
            try:
                if cancelled and (entry.stream, entry.entry_id) in cancelled:
                    self.raise_cancelled(one)
                if left_ms <= 0:
                    self.raise_expired(one)
                one.alone = self._alone(entry, task)
                one.shape_key = self._check(task)
            except TrtqError as failure:
                settlements.append(self.refused(one, failure))
                continue
            held.append(one)
        self._stages.observe_many(QUEUE_WAIT, waits_ms)
        return Admitted(held, settlements)

    def raise_cancelled(self, held: Held) -> None:
        """Raises and counts Cancelled."""
        self._counters.cancelled += 1
        raise Cancelled(f"task {held.task.task_id} was cancelled before it was run")

    def raise_expired(self, held: Held) -> None:
        """Raises and counts DeadlineExceeded."""
        self._counters.expired += 1
        raise DeadlineExceeded(
            f"task {held.task.task_id} waited longer than its {held.task.ttl_ms} ms and was not run"
        )

    def refused(self, held: Held, failure: TrtqError) -> Settlement:
        """The settlement of a task that is answered without being run."""
        dead = b""
        if isinstance(failure, PoisonTask | BatchTimeout):
            dead = _dead_record(held.entry, failure)
        reply = Reply(held.task.task_id, error_code=failure.code, error_message=failure.message)
        self._counters.failed += 1
        self._stages.failure(failure.code)
        return Settlement(
            held.entry,
            held.entry.rows,
            client_of(held.task.task_id),
            encode_reply(reply),
            keys.result(held.task.task_id) if held.task.store_s else "",
            held.task.store_s,
            dead,
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
        self._counters.corrupt += 1
        self._counters.failed += 1
        self._stages.failure(failure.code)
        task_id = sender_of(entry.frame or b"")
        reply = b""
        if task_id is not None:
            reply = encode_reply(
                Reply(task_id, error_code=failure.code, error_message=failure.message)
            )
        # Only what nobody can be told about, or nobody can read, is kept for a look.
        dead = b""
        if task_id is None or isinstance(failure, WireError):
            dead = _dead_record(entry, failure)
        client = client_of(task_id) if task_id else None
        return Settlement(entry, entry.rows, client, reply, dead_record=dead)

    def _alone(self, entry: Entry, task: InferenceTask) -> bool:
        if entry.deliveries > self._max_deliveries:
            self._counters.poisoned += 1
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


def _dead_record(entry: Entry, failure: TrtqError) -> bytes:
    frame = entry.frame or b""
    return json.dumps(
        {
            "entry": entry.entry_id.decode(),
            "stream": entry.stream,
            "code": failure.code,
            "message": failure.message,
            "bytes": len(frame),
            "frame_hex": frame[: 64 << 10].hex(),
        }
    ).encode()
