"""An engine that is a Python function: no model file, scripted failures, every run recorded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from producer.errors import EngineFailed
from producer.spec import TensorSpec
from workers.engines.base import Array, EngineSpec, numpy_dtype
from workers.engines.host_buffer import HostBuffer

Function = Callable[[dict[str, Array]], Mapping[str, Array]]


@dataclass(frozen=True)
class Call:
    """One run: which slot, in which thread, with copies of its inputs."""

    slot: int
    thread: int
    rows: int
    inputs: dict[str, Array]


class FakeSlot:
    """Grow-only buffers, and a check that only the thread that activated the slot uses it."""

    def __init__(self, number: int, spec: EngineSpec) -> None:
        self.number = number
        self.thread: int | None = None
        self.closed = False
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.inputs = {t.name: HostBuffer(numpy_dtype(t.dtype)) for t in spec.inputs}
        self.outputs = {t.name: HostBuffer(numpy_dtype(t.dtype)) for t in spec.outputs}

    def activate(self) -> None:
        """Binds the slot to the calling thread, once."""
        assert self.thread is None, "activated twice"
        self.thread = threading.get_ident()

    def input_buffer(self, name: str, rows: int, row_shape: tuple[int, ...]) -> Array:
        """As Slot.input_buffer."""
        self.check()
        self.shapes[name] = row_shape
        return self.inputs[name].array(rows, row_shape)

    @property
    def stage_ms(self) -> dict[str, float]:
        """No device."""
        return {}

    def close(self) -> None:
        """Ends the slot."""
        self.check()
        self.closed = True

    def check(self) -> None:
        """Fails if this is not the slot's thread, or the slot is closed."""
        assert self.thread is not None, "activate was not called"
        assert self.thread == threading.get_ident(), "used by two threads"
        assert not self.closed, "used after close"


@dataclass
class FakeEngine:
    """Runs `function(inputs) -> outputs` on each batch.

    `script` is consumed one entry a run: None runs, an exception is raised instead. `gate`, if
    given, is waited for in every run, so that a test can hold a batch in work.
    """

    function: Function
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    limit: int | None = None
    script: Iterable[Exception | None] = ()
    gate: threading.Event | None = None
    load_failure: Exception | None = None
    calls: list[Call] = field(default_factory=list)
    slots: list[FakeSlot] = field(default_factory=list)
    loaded: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self._script = deque(self.script)
        self._lock = threading.Lock()

    def load(self) -> None:
        """Raises `load_failure` if there is one."""
        if self.load_failure is not None:
            raise self.load_failure
        self.loaded = True

    @property
    def spec(self) -> EngineSpec:
        """As given; EngineFailed before `load`."""
        if not self.loaded:
            raise EngineFailed("not loaded")
        return EngineSpec(self.inputs, self.outputs)

    @property
    def capacity(self) -> int | None:
        """`limit`."""
        return self.limit

    def warm_sizes(self, max_batch: int) -> list[int]:
        """As the ONNX engine."""
        return sorted({1, max_batch})

    def padded_rows(self, rows: int) -> int:
        """No padding."""
        return rows

    def make_slot(self) -> FakeSlot:
        """A new slot, also appended to `slots`."""
        with self._lock:
            slot = FakeSlot(len(self.slots), self.spec)
            self.slots.append(slot)
            return slot

    def run(self, slot: FakeSlot, rows: int) -> Mapping[str, Array]:
        """Records the call, follows the script, else applies the function."""
        if self.closed or not self.loaded:
            raise EngineFailed("not loaded")
        slot.check()
        if rows < 1 or (self.limit is not None and rows > self.limit):
            raise EngineFailed(f"runs 1 to {self.limit or 'any'} rows, not {rows}")
        arrays: dict[str, Array] = {}
        for tensor in self.inputs:
            shape = slot.shapes.get(tensor.name)
            if shape is None or slot.inputs[tensor.name].rows(shape) < rows:
                raise EngineFailed(f"input {tensor.name!r} was not given {rows} rows")
            arrays[tensor.name] = slot.inputs[tensor.name].array(rows, shape).copy()
        with self._lock:
            self.calls.append(Call(slot.number, threading.get_ident(), rows, arrays))
            planned = self._script.popleft() if self._script else None
        if self.gate is not None and not self.gate.wait(30):
            raise EngineFailed("the test never opened the gate")
        if planned is not None:
            raise planned
        results = self.function(arrays)
        found: dict[str, Array] = {}
        for tensor in self.outputs:
            value = results[tensor.name]
            # The slot's own memory, overwritten by its next run, as in a real engine.
            view = slot.outputs[tensor.name].array(value.shape[0], value.shape[1:])
            view[...] = value
            found[tensor.name] = view
        return found

    def close(self) -> None:
        """Ends the engine; runs after it fail."""
        self.closed = True
