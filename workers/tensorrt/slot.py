"""One batch at a time on the GPU: pinned buffers, device buffers, a stream, execution contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from producer.errors import EngineFailed
from producer.spec import TensorSpec
from workers.engines.base import DEVICE_STAGES, Array, numpy_dtype
from workers.ranges import NO_RANGES, Ranges
from workers.tensorrt.bindings import Bindings, ProfileBounds
from workers.tensorrt.context import PlanContext
from workers.tensorrt.cuda import DeviceMemory, Driver, PinnedMemory, Stream
from workers.tensorrt.memory import Budget, GrowingBuffer
from workers.tensorrt.outputs import OutputAllocator
from workers.tensorrt.padding import padded
from workers.tensorrt.profiles import Shape

_H2D, _EXECUTE, _D2H = DEVICE_STAGES


class _Tensor:
    """Pinned and device memory of one tensor."""

    def __init__(self, spec: TensorSpec, driver: Driver, pinned: Budget) -> None:
        self.spec = spec
        self.dtype = numpy_dtype(spec.dtype)
        self.host: GrowingBuffer[PinnedMemory] = GrowingBuffer(driver.pinned, pinned)
        self.device: GrowingBuffer[DeviceMemory] = GrowingBuffer(driver.device)

    def size_bytes(self, shape: Shape) -> int:
        return max(1, math.prod(shape) * self.dtype.itemsize)

    def allocate(self, shape: Shape) -> None:
        self.view(shape)
        self.address(shape)

    def view(self, shape: Shape) -> Array:
        """Pinned memory as an array of `shape`."""
        size = math.prod(shape) * self.dtype.itemsize
        memory = self.host.at_least(max(1, size))
        return memory.array[:size].view(self.dtype).reshape(shape)

    def address(self, shape: Shape) -> int:
        """Device memory for `shape`."""
        return self.device.at_least(self.size_bytes(shape)).address

    def close(self) -> None:
        self.host.close()
        self.device.close()


class SlotParts(NamedTuple):
    """What a slot gets from its engine: `new_context` makes a context, `new_allocator` one for an
    output whose shape depends on the data, `context_made` is told after a context's first batch.
    """

    driver: Driver
    bindings: Bindings
    pinned: Budget
    new_context: Callable[[ProfileBounds, int], PlanContext]
    new_allocator: Callable[[GrowingBuffer[DeviceMemory]], OutputAllocator]
    context_made: Callable[[], None]
    ranges: Ranges = NO_RANGES


class TensorRTSlot:
    """A slot of a TensorRT engine. All of it belongs to the thread that called `activate`.

    Each profile gets a context of its own at its first batch, so that switching between them
    costs nothing. A batch is filled up to the next of `sizes` with copies of its last row, whose
    outputs nobody sees.
    """

    def __init__(self, parts: SlotParts, max_batch: int, sizes: Sequence[int] = ()) -> None:
        self._parts = parts
        self._max_batch = max_batch
        self._sizes = sizes
        self._inputs: dict[str, _Tensor] = {}
        self._outputs: dict[str, _Tensor] = {}
        self._allocators: dict[str, OutputAllocator] = {}
        self._row_shapes: dict[str, Shape] = {}
        self._contexts: dict[int, PlanContext] = {}
        self._shapes_before: tuple[Shape, ...] = ()
        self._profile: ProfileBounds | None = None
        self._stream: Stream | None = None
        self._active = False

    def activate(self) -> None:
        """Takes the CUDA context into this thread and allocates for batches of `max_batch` rows.

        Dynamic row dimensions are left out; their buffers grow with the first batch. Raises
        OutOfDeviceMemory, ConfigError (pinned memory beyond its limit).
        """
        driver, spec, pinned = self._parts.driver, self._parts.bindings.spec, self._parts.pinned
        driver.push()
        self._active = True
        self._stream = driver.stream()
        self._inputs = {t.name: _Tensor(t, driver, pinned) for t in spec.inputs}
        self._outputs = {t.name: _Tensor(t, driver, pinned) for t in spec.outputs}
        for tensor in (*self._inputs.values(), *self._outputs.values()):
            if None not in tensor.spec.shape:
                row = tuple(size for size in tensor.spec.shape if size is not None)
                tensor.allocate((self._max_batch, *row))

    def input_buffer(self, name: str, rows: int, row_shape: Shape) -> Array:
        """Pinned memory of input `name` as (rows, *row_shape); see Slot.input_buffer."""
        self._row_shapes[name] = row_shape
        return self._inputs[name].view((rows, *row_shape))

    @property
    def stage_ms(self) -> Mapping[str, float]:
        """Device time in ms of each of DEVICE_STAGES in the last batch; see Slot.stage_ms."""
        if self._stream is None:
            return {}
        return dict(zip(DEVICE_STAGES, self._stream.lap_ms(), strict=True))

    def run(self, rows: int) -> Mapping[str, Array]:
        """Copies in, executes, copies out; returns views of pinned memory.

        Raises EngineFailed for shapes outside every profile (before anything is enqueued) and
        where TensorRT refuses; OutOfDeviceMemory; DeviceLost.
        """
        stream, ranges = self._stream, self._parts.ranges
        if stream is None:
            raise EngineFailed("the slot is not active: call activate in its thread")
        shapes = self._shapes(rows)
        size = padded(rows, self._sizes)
        if size > rows:
            shapes = self._fill_up(rows, size)
        profile = self._profile_for(shapes)
        if profile is None:
            raise EngineFailed(
                f"no optimization profile takes inputs of shapes {shapes}; the largest takes up "
                f"to {self._parts.bindings.profiles[-1].high}: build the engine with a wider "
                "profile"
            )
        context = self._contexts.get(profile.number)
        is_new = context is None
        if context is None:
            context = self._parts.new_context(profile, stream.handle)
            self._contexts[profile.number] = context
        outputs = context.set_shapes(shapes)
        late = [name for name, shape in outputs.items() if min(shape, default=0) < 0]
        self._allocate_late(context, late)
        addresses = {name: self._inputs[name].address(shape) for name, shape in shapes.items()}
        for name, shape in outputs.items():
            if name not in late:
                addresses[name] = self._outputs[name].address(shape)
        context.bind(addresses)
        stream.mark(0)
        with ranges.open(_H2D, size):
            for name, shape in shapes.items():
                self._copy_in(stream, name, shape, addresses[name])
        stream.mark(1)
        with ranges.open(_EXECUTE, size):
            enqueued = context.enqueue(stream.handle)
        if not enqueued:
            # What was enqueued may still read the buffers.
            stream.wait()
            refused = next((a.failure for a in self._allocators.values() if a.failure), None)
            raise refused or EngineFailed(f"TensorRT could not run a batch of {rows} rows")
        stream.mark(2)
        if late:
            stream.wait()
            outputs = {**outputs, **self._late_shapes(late)}
        found = {}
        with ranges.open(_D2H, size):
            for name, shape in outputs.items():
                found[name] = target = self._outputs[name].view(shape)
                if target.nbytes:
                    stream.copy_out(target, self._outputs[name].address(shape))
        stream.mark(3)
        stream.wait()
        if not late:
            context.after_run(stream.handle)
        if is_new:
            self._parts.context_made()
        return found if size == rows else {name: array[:rows] for name, array in found.items()}

    def close(self) -> None:
        """Frees everything, in the slot's thread; a second call does nothing."""
        if not self._active:
            return
        self._active = False
        for context in self._contexts.values():
            context.close()
        self._contexts, self._allocators = {}, {}
        for tensor in (*self._inputs.values(), *self._outputs.values()):
            tensor.close()
        self._inputs, self._outputs, self._stream = {}, {}, None
        self._parts.driver.pop()

    def _profile_for(self, shapes: dict[str, Shape]) -> ProfileBounds | None:
        wanted = tuple(shapes.values())
        if wanted != self._shapes_before:
            self._profile = self._parts.bindings.profile_for(shapes)
            self._shapes_before = wanted
        return self._profile

    def _fill_up(self, rows: int, size: int) -> dict[str, Shape]:
        shapes = {}
        for name, tensor in self._inputs.items():
            row = self._row_shapes[name]
            shapes[name] = (size, *row)
            held = tensor.view((rows, *row))
            grows = tensor.host.size_bytes < tensor.size_bytes(shapes[name])
            if grows:
                # Growing would lose the rows: dynamic shapes only, the others hold any batch.
                held = held.copy()
            filled = tensor.view(shapes[name])
            if grows:
                filled[:rows] = held
            filled[rows:] = held[rows - 1]
        return shapes

    def _copy_in(self, stream: Stream, name: str, shape: Shape, address: int) -> None:
        source = self._inputs[name].view(shape)
        if source.nbytes:
            stream.copy_in(address, source)

    def _shapes(self, rows: int) -> dict[str, Shape]:
        shapes = {}
        for name, tensor in self._inputs.items():
            row = self._row_shapes.get(name)
            if row is None or tensor.host.size_bytes < tensor.size_bytes((rows, *row)):
                raise EngineFailed(f"input {name!r} was not given {rows} rows: call input_buffer")
            shapes[name] = (rows, *row)
        return shapes

    def _allocate_late(self, context: PlanContext, names: list[str]) -> None:
        for name in names:
            allocator = self._allocators.get(name)
            if allocator is None:
                allocator = self._parts.new_allocator(self._outputs[name].device)
                self._allocators[name] = allocator
            context.allocate_by(name, allocator)
            allocator.begin()

    def _late_shapes(self, names: list[str]) -> dict[str, Shape]:
        shapes = {}
        for name in names:
            shape = self._allocators[name].shape
            if shape is None:
                raise EngineFailed(f"TensorRT did not tell the shape of output {name!r}")
            shapes[name] = shape
        return shapes
