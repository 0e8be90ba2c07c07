"""Rows into a slot's buffers, outputs out of them: one copy each way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from producer.errors import ForbiddenNaN, TrtqError
from producer.spec import ModelSpec
from producer.task import InferenceTask, Tensor
from workers.batcher import Held
from workers.engines.base import Array, Slot
from workers.files import RowFiles

# Below this, slice assignment is faster than a numpy copy, which lets other threads run.
_SMALL_BYTES = 32 << 10


class Gathered:
    """What `gather` put into the slot: tasks with their first row, and those that failed."""

    __slots__ = ("failed", "nan_rows", "placed", "rows")

    def __init__(self) -> None:
        self.placed: list[tuple[Held, int]] = []
        self.failed: list[tuple[Held, TrtqError]] = []
        #: Rows of the batch whose inputs hold NaN, by reference only, where the model forbids it.
        self.nan_rows: set[int] = set()
        self.rows = 0


def gather(slot: Slot, batch: list[Held], spec: ModelSpec, files: RowFiles) -> Gathered:
    """Copies every task's rows into the slot's input buffers, one task after the other.

    A task whose files cannot be read is left out and reported; the others move up.
    """
    total = sum(held.rows for held in batch)
    shapes = batch[0].shape_key
    buffers = [
        slot.input_buffer(tensor.name, total, row_shape)
        for tensor, (_, row_shape) in zip(spec.inputs, shapes, strict=True)
    ]
    views = [memoryview(_bytes_of(buffer)) for buffer in buffers]
    row_bytes = [len(view) // total if total else 0 for view in views]
    gathered = Gathered()
    at = 0
    for held in batch:
        task = held.task
        try:
            if task.reference is None:
                for index, tensor in enumerate(task.inputs):
                    first = at * row_bytes[index]
                    size = len(tensor.data)
                    if size < _SMALL_BYTES:
                        views[index][first : first + size] = tensor.data
                    else:
                        source = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
                        np.copyto(buffers[index][at : at + held.rows], source)
            else:
                _read(task, buffers, at, spec, files, gathered)
        except TrtqError as failure:
            gathered.failed.append((held, failure))
            continue
        gathered.placed.append((held, at))
        at += held.rows
    gathered.rows = at
    return gathered


def _read(
    task: InferenceTask,
    buffers: list[Array],
    at: int,
    spec: ModelSpec,
    files: RowFiles,
    gathered: Gathered,
) -> None:
    reference = task.reference
    assert reference is not None
    paths = dict(reference.inputs)
    for index, tensor in enumerate(spec.inputs):
        into = buffers[index][at : at + task.rows]
        files.read_rows(paths[tensor.name], reference.start, reference.stop, into, tensor)
        if spec.forbid_nan:
            gathered.nan_rows.update(at + row for row in nan_rows(into))


def nan_rows(array: Array) -> list[int]:
    """Rows that hold NaN."""
    if array.dtype.kind != "f" or not len(array):
        return []
    found = np.isnan(array.reshape(len(array), -1)).any(axis=1)
    return [int(row) for row in np.flatnonzero(found)]


def check_nan(spec: ModelSpec, tensors: tuple[Tensor, ...]) -> None:
    """Raises ForbiddenNaN if any float input holds one."""
    for tensor in tensors:
        array = np.frombuffer(tensor.data, tensor.dtype)
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise ForbiddenNaN(
                f"model {spec.name!r}, input {tensor.name!r} holds NaN, which the model forbids"
            )


class Cutter:
    """Cuts the outputs of one batch into its tasks' tensors."""

    def __init__(self, outputs: Mapping[str, Array]) -> None:
        self._outputs = [(name, _name_of(array.dtype), array) for name, array in outputs.items()]

    def cut(self, first: int, rows: int) -> tuple[Tensor, ...]:
        """One task's rows of every output, to be encoded before the slot runs again."""
        tensors = []
        for name, dtype, array in self._outputs:
            part = array[first : first + rows]
            small = part.nbytes < _SMALL_BYTES
            data: Any = part.tobytes() if small else memoryview(_bytes_of(part))
            tensors.append(Tensor(name, dtype, part.shape, data))
        return tuple(tensors)


@lru_cache(maxsize=64)
def _name_of(dtype: np.dtype[Any]) -> str:
    # numpy computes it anew at each look, for 10 us.
    return str(dtype.name)


def _bytes_of(array: Array) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
