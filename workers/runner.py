"""One batch in one slot: gather, run, scatter, and a failure kept to the task that caused it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from producer import keys
from producer.entries import Settlement
from producer.errors import DeviceLost, EngineFailed, ForbiddenNaN, TrtqError
from producer.spec import ModelSpec
from producer.task import InferenceTask, Reply, RowError, client_of
from producer.wire import encode_reply
from workers import rows as row_copies
from workers.batcher import Held
from workers.engines.base import Array, Engine, Slot, numpy_dtype
from workers.files import RowFiles
from workers.incidents import FAILED, RETRIED, ROWS_FAILED, Incidents
from workers.metrics import Counters
from workers.ranges import NO_RANGES, Ranges
from workers.stages import GATHER, HOLD, RUN, SCATTER, Stages
from workers.tracing import NO_TRACING, Tracing, trace_of


class BatchRunner:
    """Runs batches of one model; used by all its slot threads at once. `clock` gives ms."""

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        files: RowFiles,
        counters: Counters,
        stages: Stages,
        incidents: Incidents,
        clock: Callable[[], float],
        ranges: Ranges = NO_RANGES,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._files = files
        self._counters = counters
        self._stages = stages
        self._incidents = incidents
        self._clock = clock
        self._output_dtypes = [numpy_dtype(tensor.dtype) for tensor in spec.outputs]
        self._ranges = ranges
        self._tracing = tracing

    def run(
        self,
        slot: Slot,
        batch: list[Held],
        on_retry: Callable[[list[Held]], None] = lambda tasks: None,
    ) -> list[Settlement]:
        """One settlement per task. Raises DeviceLost; other failures are the tasks' answers.

        `on_retry(tasks)` is called before each run that follows a failure, with what it runs.
        """
        try:
            with self._tracing.batch(batch):
                settlements = self._run_together(slot, batch)
        except DeviceLost:
            raise
        except Exception as failure:  # noqa: BLE001 - an engine or out of memory raises anything
            if len(batch) > 1:
                names = [held.task.task_id for held in batch]
                detail = f"their batch failed, each runs alone: {failure!r}"
                self._incidents.record(RETRIED, _code(failure), names, detail)
                settlements = []
                for held in batch:
                    on_retry([held])
                    settlements += self.run(slot, [held], on_retry)
                return settlements
            return [self._run_by_row(slot, batch[0], failure, on_retry)]
        rows = sum(held.rows for held in batch)
        self._counters.batch(rows, self._engine.padded_rows(rows) - rows)
        self._stages.batch(rows)
        return settlements

    def _run_together(self, slot: Slot, batch: list[Held]) -> list[Settlement]:
        started_ms = self._clock()
        with self._ranges.open(GATHER, len(batch)):
            gathered = row_copies.gather(slot, batch, self._spec, self._files)
        gathered_ms = self._clock()
        settlements = [self.failed(held, failure) for held, failure in gathered.failed]
        if not gathered.rows:
            return settlements
        with self._ranges.open(RUN, gathered.rows):
            outputs = self._engine.run(slot, gathered.rows)
        ran_ms = self._clock()
        for stage, took_ms in slot.stage_ms.items():
            self._stages.observe(stage, took_ms)
        with self._ranges.open(SCATTER, gathered.rows):
            settlements += self._scatter(outputs, gathered)
        observe = self._stages.observe
        observe(HOLD, started_ms - min(held.arrived_ms for held in batch))
        observe(GATHER, gathered_ms - started_ms)
        observe(RUN, ran_ms - gathered_ms)
        observe(SCATTER, self._clock() - ran_ms)
        return settlements

    def _scatter(
        self, outputs: Mapping[str, Array], gathered: row_copies.Gathered
    ) -> list[Settlement]:
        self._check(outputs, gathered.rows)
        bad = set(gathered.nan_rows)
        if self._spec.forbid_nan:
            for array in outputs.values():
                bad.update(row_copies.nan_rows(array))
        cutter = row_copies.Cutter(outputs)
        settlements = []
        for held, first in gathered.placed:
            mine = sorted(row - first for row in bad if first <= row < first + held.rows)
            settlements.append(self._answered(held, outputs, cutter, first, mine))
        return settlements

    def _check(self, outputs: Mapping[str, Array], rows: int) -> None:
        for tensor, dtype in zip(self._spec.outputs, self._output_dtypes, strict=True):
            array = outputs.get(tensor.name)
            if array is None or array.shape[:1] != (rows,):
                shape = None if array is None else array.shape
                raise EngineFailed(
                    f"model {self._spec.name!r}: output {tensor.name!r} has shape {shape} for "
                    f"{rows} rows; its first axis must be the batch"
                )
            if array.dtype != dtype or not _fits(array.shape[1:], tensor.shape):
                raise EngineFailed(
                    f"model {self._spec.name!r}: output {tensor.name!r} has rows of {array.dtype} "
                    f"{array.shape[1:]}, the model declares {dtype} {tensor.shape}"
                )

    def _answered(
        self,
        held: Held,
        outputs: Mapping[str, Array],
        cutter: row_copies.Cutter,
        first: int,
        nan_rows: list[int],
    ) -> Settlement:
        task = held.task
        if task.reference is None and not nan_rows:
            return self._settle(held, Reply(task.task_id, cutter.cut(first, task.rows)))
        nan = ForbiddenNaN(f"model {self._spec.name!r} forbids NaN and this row has some")
        if task.reference is None:
            return self.failed(held, nan)
        errors = tuple(RowError(task.reference.start + r, nan.code, nan.message) for r in nan_rows)
        try:
            for tensor in self._spec.outputs:
                array = outputs[tensor.name][first : first + task.rows]
                if nan_rows:
                    array = array.copy()
                    array[nan_rows] = _missing(array)
                self._write(task, tensor.name, task.reference.start, array)
        except TrtqError as failure:
            return self.failed(held, failure)
        return self._rows_settled(held, errors)

    def _run_by_row(
        self,
        slot: Slot,
        held: Held,
        failure: Exception,
        on_retry: Callable[[list[Held]], None],
    ) -> Settlement:
        """The end of a task that failed alone; rows of a reference may still succeed one by one."""
        reference = held.task.reference
        named = self._named(failure)
        if reference is None:
            return self.failed(held, named)
        name, detail = held.task.task_id, f"its rows run one by one: {failure!r}"
        self._incidents.record(RETRIED, named.code, [name], detail)
        errors: list[RowError] = []
        for row in range(reference.start, reference.stop):
            part = InferenceTask(
                held.task.task_id, 1, reference=reference._replace(start=row, stop=row + 1)
            )
            one = Held(held.entry, part, held.shape_key, held.arrived_ms, held.expires_ms)
            on_retry([held])
            try:
                gathered = row_copies.gather(slot, [one], self._spec, self._files)
                if gathered.failed:
                    return self.failed(held, gathered.failed[0][1])
                outputs = self._engine.run(slot, 1)
                self._check(outputs, 1)
                if self._spec.forbid_nan and (
                    gathered.nan_rows or any(row_copies.nan_rows(a) for a in outputs.values())
                ):
                    raise ForbiddenNaN(f"model {self._spec.name!r} forbids NaN")
            except DeviceLost:
                raise
            except Exception as row_failure:  # noqa: BLE001 - as in `run`
                row_error = self._named(row_failure)
                errors.append(RowError(row, row_error.code, row_error.message))
                outputs = self._missing_row(held)
            try:
                for tensor in self._spec.outputs:
                    if tensor.name in outputs:
                        self._write(held.task, tensor.name, row, outputs[tensor.name])
            except TrtqError as write_failure:
                return self.failed(held, write_failure)
        return self._rows_settled(held, errors)

    def _missing_row(self, held: Held) -> dict[str, Array]:
        found = {}
        for tensor in self._spec.outputs:
            if None not in tensor.shape:
                shape = tuple(size for size in tensor.shape if size is not None)
                array = np.zeros((1, *shape), tensor.dtype)
                array[...] = _missing(array)
                found[tensor.name] = array
        return found

    def _write(self, task: InferenceTask, name: str, row: int, array: Array) -> None:
        assert task.reference is not None
        spec = next(tensor for tensor in self._spec.outputs if tensor.name == name)
        self._files.write_rows(dict(task.reference.outputs)[name], row, array, spec)

    def failed(self, held: Held, failure: TrtqError) -> Settlement:
        """The settlement of a task that ends with an error."""
        self._counters.failed += 1
        self._stages.failure(failure.code)
        # Of other errors the text says all, and their causes may quote a client's file.
        cause = failure.__cause__ if isinstance(failure, EngineFailed) else None
        name = held.task.task_id
        self._incidents.record(FAILED, failure.code, [name], failure.message, cause)
        reply = Reply(held.task.task_id, error_code=failure.code, error_message=failure.message)
        return self._settle(held, reply)

    def _rows_settled(self, held: Held, errors: Sequence[RowError]) -> Settlement:
        """The settlement of a task by reference, some of whose rows may have failed."""
        task = held.task
        if errors:
            self._counters.failed += 1
            self._stages.failure(errors[0].code)
        for code in dict.fromkeys(error.code for error in errors):
            found = [error for error in errors if error.code == code]
            detail = f"{len(found)} of {task.rows} rows, first {found[0].row}: {found[0].message}"
            self._incidents.record(ROWS_FAILED, code, [task.task_id], detail)
        return self._settle(held, Reply(task.task_id, row_errors=tuple(errors)))

    def _settle(self, held: Held, reply: Reply) -> Settlement:
        task = held.task
        stored = keys.result(task.task_id) if task.store_s else ""
        return Settlement(
            held.entry,
            held.entry.rows,
            client_of(task.task_id),
            encode_reply(reply),
            stored,
            task.store_s,
            trace=trace_of(task),
        )

    def _named(self, failure: Exception) -> TrtqError:
        if isinstance(failure, TrtqError):
            return failure
        named = EngineFailed(
            f"model {self._spec.name!r} failed on this task alone: "
            f"{type(failure).__name__}: {str(failure)[:500]}"
        )
        named.__cause__ = failure
        return named


def _code(failure: Exception) -> str:
    return failure.code if isinstance(failure, TrtqError) else EngineFailed.code


def _fits(row_shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return row_shape == declared or (
        len(row_shape) == len(declared)
        and all(want in (None, size) for size, want in zip(row_shape, declared, strict=True))
    )


def _missing(array: Array) -> float:
    return float("nan") if array.dtype.kind == "f" else 0
