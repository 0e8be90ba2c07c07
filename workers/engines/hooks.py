"""An engine between two Python functions of the model's own: preprocess and postprocess.

Clients send what preprocess takes and get what postprocess gives. Both run in the slot's thread,
so they overlap what other slots do on the device. Preprocess writes into the engine's own input
buffers, which on a GPU are the pinned memory that is copied from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from producer.errors import EngineFailed
from producer.spec import TensorSpec
from workers.engines.base import (
    POSTPROCESS,
    PREPROCESS,
    Array,
    Engine,
    EngineSpec,
    Slot,
    numpy_dtype,
)
from workers.engines.hook_functions import Hook
from workers.engines.host_buffer import HostBuffer
from workers.ranges import NO_RANGES, Ranges


class InputBuffers(Mapping[str, Array]):
    """The engine's inputs that a preprocess function fills, for one batch of `rows` rows.

    `into[name]` is a writable C-contiguous array of shape (rows, *row shape) and the input's
    dtype; its content is undefined until written. `into[name] = array` copies an array there.
    Where rows have dynamic axes, that or `buffer` must come first: they tell the shape.
    """

    def __init__(self, hook: Hook, slot: Slot, inputs: Sequence[TensorSpec], rows: int) -> None:
        self.rows = rows
        self._hook = hook
        self._slot = slot
        self._specs = {tensor.name: tensor for tensor in inputs}
        self._made: dict[str, Array] = {}

    def buffer(self, name: str, row_shape: Sequence[int]) -> Array:
        """The array of input `name` for rows of `row_shape`, also given by `into[name]` from then.

        All rows of a batch have one shape. Raises KeyError for an unknown name and HookFailed for
        a shape that the model does not take.
        """
        tensor = self._tensor(name)
        shape = tuple(row_shape)
        if not _matches(shape, tensor):
            raise self._hook.failed(
                f"asked for rows of shape {shape} of the model's input {name!r}, which takes "
                f"{_shape_text(tensor)}"
            )
        self._made[name] = self._slot.input_buffer(name, self.rows, shape)
        return self._made[name]

    def check_complete(self) -> None:
        """Raises HookFailed for an input that was never asked for: it holds an earlier batch."""
        missing = [name for name in self._specs if name not in self._made]
        if missing:
            raise self._hook.failed(
                f"did not fill the model's input {', '.join(map(repr, missing))}: write to "
                f"into[{missing[0]!r}] (what the function returns is not used)"
            )

    def __setitem__(self, name: str, value: Array) -> None:
        """Copies `value`, shape (rows, *row shape) and a dtype that casts by NumPy's "same_kind".

        Raises KeyError and HookFailed as `buffer`, and HookFailed for another number of rows or
        dtype.
        """
        if not isinstance(value, np.ndarray) or value.shape[:1] != (self.rows,):
            what = value.shape if isinstance(value, np.ndarray) else type(value).__name__
            raise self._hook.failed(
                f"set the model's input {name!r} to {what}; it must be an array of {self.rows} rows"
            )
        if value is self._made.get(name):
            return
        target = self.buffer(name, value.shape[1:])
        if not np.can_cast(value.dtype, target.dtype, "same_kind"):
            raise self._hook.failed(
                f"set the model's input {name!r}, {target.dtype}, to an array of {value.dtype}"
            )
        np.copyto(target, value, casting="same_kind")

    def __getitem__(self, name: str) -> Array:
        made = self._made.get(name)
        if made is not None:
            return made
        tensor = self._tensor(name)
        if None in tensor.shape:
            raise self._hook.failed(
                f"read into[{name!r}], whose rows have dynamic axes {_shape_text(tensor)}: assign "
                f"an array to it, or call into.buffer({name!r}, row_shape) first"
            )
        return self.buffer(name, [size for size in tensor.shape if size is not None])

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def _tensor(self, name: str) -> TensorSpec:
        tensor = self._specs.get(name)
        if tensor is None:
            raise KeyError(f"the model has inputs {list(self._specs)}, not {name!r}")
        return tensor


class HookedSlot:
    """A slot of the engine inside, and memory for what clients send where that differs."""

    def __init__(self, inner: Slot, buffers: Mapping[str, HostBuffer]) -> None:
        self.inner = inner
        #: Times of the last run's hooks in ms, by stage.
        self.hook_ms: dict[str, float] = {}
        self._buffers = buffers
        self._row_shapes: dict[str, tuple[int, ...]] = {}

    def activate(self) -> None:
        """Activates the slot inside; see Slot.activate."""
        self.inner.activate()

    def input_buffer(self, name: str, rows: int, row_shape: tuple[int, ...]) -> Array:
        """Memory for clients' input `name`; the engine's own without a preprocess function."""
        if not self._buffers:
            return self.inner.input_buffer(name, rows, row_shape)
        self._row_shapes[name] = row_shape
        return self._buffers[name].array(rows, row_shape)

    def inputs(self, rows: int) -> dict[str, Array]:
        """Clients' inputs of the first `rows` rows; raises EngineFailed where they were not given.

        Without a preprocess function there are none.
        """
        found = {}
        for name, buffer in self._buffers.items():
            shape = self._row_shapes.get(name)
            if shape is None or buffer.rows(shape) < rows:
                raise EngineFailed(
                    f"input {name!r} was not given {rows} rows: call input_buffer first"
                )
            found[name] = buffer.array(rows, shape)
        return found

    @property
    def stage_ms(self) -> Mapping[str, float]:
        """Times of the hooks, and what the slot inside measured; see Slot.stage_ms."""
        return {**self.hook_ms, **self.inner.stage_ms}

    def close(self) -> None:
        """Closes the slot inside and frees the memory."""
        self.inner.close()
        self._row_shapes = {}
        self._buffers = {name: HostBuffer(buffer.dtype) for name, buffer in self._buffers.items()}


class HookedEngine:
    """`engine` as clients of `model` see it through at least one hook.

    `max_batch` is the number of rows for which slots allocate at first. `clock` gives ms.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        preprocess: Hook | None,
        postprocess: Hook | None,
        *,
        max_batch: int,
        clock: Callable[[], float] = lambda: time.perf_counter() * 1000,
        ranges: Ranges = NO_RANGES,
    ) -> None:
        self._engine = engine
        self._model = model
        self._preprocess = preprocess
        self._postprocess = postprocess
        self._max_batch = max_batch
        self._clock = clock
        self._ranges = ranges
        self._open = False

    def load(self) -> None:
        """Loads the engine; see Engine.load."""
        self._engine.load()
        self._open = True

    @property
    def spec(self) -> EngineSpec:
        """The inputs of preprocess and the outputs of postprocess; the engine's where none is."""
        inner = self._engine.spec
        before, after = self._preprocess, self._postprocess
        return EngineSpec(
            inner.inputs if before is None else before.tensors,
            inner.outputs if after is None else after.tensors,
        )

    @property
    def capacity(self) -> int | None:
        """The engine's: a hook makes one row of each row."""
        return self._engine.capacity

    @property
    def pinned_bytes(self) -> int | None:
        """The engine's pinned memory; None where it has none."""
        return getattr(self._engine, "pinned_bytes", None)

    def warm_sizes(self, max_batch: int) -> Sequence[int]:
        """The engine's; the hooks are warmed with it."""
        return self._engine.warm_sizes(max_batch)

    def padded_rows(self, rows: int) -> int:
        """The engine's; the hooks see no more than `rows`."""
        return self._engine.padded_rows(rows)

    def make_slot(self) -> HookedSlot:
        """A slot, with memory for `max_batch` rows of what clients send; see Engine.make_slot."""
        capacity = self.capacity
        rows = self._max_batch if capacity is None else min(self._max_batch, capacity)
        sent = () if self._preprocess is None else self._preprocess.tensors
        buffers = {tensor.name: HostBuffer(numpy_dtype(tensor.dtype)) for tensor in sent}
        try:
            for tensor in sent:
                if None not in tensor.shape:
                    row = tuple(size for size in tensor.shape if size is not None)
                    buffers[tensor.name].array(rows, row)
        except (MemoryError, ValueError) as failure:  # NumPy's words for a size beyond all memory
            raise EngineFailed(
                f"model {self._model!r}: no memory for {rows} rows of preprocess' inputs; lower "
                "max_batch or slots"
            ) from failure
        return HookedSlot(self._engine.make_slot(), buffers)

    def run(self, slot: HookedSlot, rows: int) -> Mapping[str, Array]:
        """Preprocess, the engine, postprocess; see Engine.run.

        Raises HookFailed for a hook that raised or gave what the configuration does not say, what
        a hook raised to refuse its input (InvalidInput), and what the engine raises.
        """
        if not self._open:
            raise EngineFailed(f"model {self._model!r} is not loaded: call load first")
        capacity = self.capacity
        if rows < 1 or (capacity is not None and rows > capacity):
            raise EngineFailed(
                f"model {self._model!r} runs 1 to {capacity or 'any'} rows, not {rows}"
            )
        slot.hook_ms = {}
        if self._preprocess is not None:
            started_ms = self._clock()
            inputs = slot.inputs(rows)
            into = InputBuffers(self._preprocess, slot.inner, self._engine.spec.inputs, rows)
            with self._ranges.open(PREPROCESS, rows):
                self._preprocess(inputs, into)
                into.check_complete()
            slot.hook_ms[PREPROCESS] = self._clock() - started_ms
        outputs = self._engine.run(slot.inner, rows)
        if self._postprocess is not None:
            started_ms = self._clock()
            with self._ranges.open(POSTPROCESS, rows):
                outputs = _checked(self._postprocess, self._postprocess(outputs), rows)
            slot.hook_ms[POSTPROCESS] = self._clock() - started_ms
        return outputs

    def close(self) -> None:
        """Frees the engine."""
        self._open = False
        self._engine.close()


def _checked(hook: Hook, found: Any, rows: int) -> dict[str, Array]:
    """What postprocess returned, in the configured order; raises HookFailed where it differs."""
    names = [tensor.name for tensor in hook.tensors]
    if not isinstance(found, Mapping):
        raise hook.failed(f"returned a {type(found).__name__}, not a dict with outputs {names}")
    if set(found) != set(names):
        raise hook.failed(f"returned outputs {sorted(map(str, found))}, not {sorted(names)}")
    arrays = {}
    for tensor in hook.tensors:
        value = found[tensor.name]
        if not isinstance(value, np.ndarray):
            raise hook.failed(
                f"returned output {tensor.name!r} as a {type(value).__name__}, not a numpy array"
            )
        if value.dtype != numpy_dtype(tensor.dtype):
            raise hook.failed(
                f"returned output {tensor.name!r} as {value.dtype}, not {tensor.dtype}"
            )
        if value.shape[:1] != (rows,) or not _matches(value.shape[1:], tensor):
            raise hook.failed(
                f"returned output {tensor.name!r} of shape {value.shape} for {rows} rows; it must "
                f"be {rows} rows of {_shape_text(tensor)}"
            )
        # A subclass, as a masked array, has other meanings of the same operations.
        arrays[tensor.name] = np.asarray(value)
    return arrays


def _matches(row_shape: Sequence[int], tensor: TensorSpec) -> bool:
    return len(row_shape) == len(tensor.shape) and all(
        want in (None, got) and got >= 0 for want, got in zip(tensor.shape, row_shape, strict=True)
    )


def _shape_text(tensor: TensorSpec) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in tensor.shape)})"
