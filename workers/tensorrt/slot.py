"""One batch at a time on the GPU: pinned buffers, device buffers, a stream, execution contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from producer.errors import EngineFailed
from producer.spec import TensorSpec
from workers.engines.base import Array, numpy_dtype
from workers.tensorrt.bindings import Bindings, ProfileBounds
from workers.tensorrt.cuda import DeviceMemory, Driver, PinnedMemory, Stream
from workers.tensorrt.memory import Budget, GrowingBuffer
from workers.tensorrt.profiles import Shape


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
        self.device.at_least(self.size_bytes(shape))

    def view(self, shape: Shape) -> Array:
        """Pinned memory as an array of `shape`."""
        size = math.prod(shape) * self.dtype.itemsize
        memory = self.host.at_least(max(1, size))
        return memory.array[:size].view(self.dtype).reshape(shape)

    def bind(self, context: Any, shape: Shape) -> tuple[int, Array]:
        """Gives the context device memory for `shape`; its address, and the pinned array."""
        address = self.device.at_least(self.size_bytes(shape)).address
        context.set_tensor_address(self.spec.name, address)
        return address, self.view(shape)

    def close(self) -> None:
        self.host.close()
        self.device.close()


class TensorRTSlot:
    """A slot of a TensorRT engine. All of it belongs to the thread that called `activate`.

    `new_context(profile)` makes an execution context for a profile; each profile gets one at its
    first batch, so switching between them costs nothing.
    """

    def __init__(
        self,
        driver: Driver,
        bindings: Bindings,
        max_batch: int,
        new_context: Callable[[ProfileBounds, int], Any],
        pinned: Budget,
    ) -> None:
        self._driver = driver
        self._bindings = bindings
        self._max_batch = max_batch
        self._new_context = new_context
        self._pinned = pinned
        self._inputs: dict[str, _Tensor] = {}
        self._outputs: dict[str, _Tensor] = {}
        self._row_shapes: dict[str, Shape] = {}
        self._contexts: dict[int, Any] = {}
        self._stream: Stream | None = None
        self._active = False

    def activate(self) -> None:
        """Takes the CUDA context into this thread and allocates for batches of `max_batch` rows.

        Dynamic row dimensions are left out; their buffers grow with the first batch. Raises
        OutOfDeviceMemory, ConfigError (pinned memory beyond its limit).
        """
        self._driver.push()
        self._active = True
        self._stream = self._driver.stream()
        spec = self._bindings.spec
        self._inputs = {t.name: _Tensor(t, self._driver, self._pinned) for t in spec.inputs}
        self._outputs = {t.name: _Tensor(t, self._driver, self._pinned) for t in spec.outputs}
        for tensor in (*self._inputs.values(), *self._outputs.values()):
            if None not in tensor.spec.shape:
                row = tuple(size for size in tensor.spec.shape if size is not None)
                tensor.allocate((self._max_batch, *row))

    def input_buffer(self, name: str, rows: int, row_shape: Shape) -> Array:
        """Pinned memory of input `name` as (rows, *row_shape); see Slot.input_buffer."""
        self._row_shapes[name] = row_shape
        return self._inputs[name].view((rows, *row_shape))

    def run(self, rows: int) -> Mapping[str, Array]:
        """Copies in, executes, copies out; returns views of pinned memory.

        Raises EngineFailed for shapes outside every profile (before anything is enqueued) and
        where TensorRT refuses; OutOfDeviceMemory; DeviceLost.
        """
        stream = self._stream
        if stream is None:
            raise EngineFailed("the slot is not active: call activate in its thread")
        shapes = self._shapes(rows)
        profile = self._bindings.profile_for(shapes)
        if profile is None:
            raise EngineFailed(
                f"no optimization profile takes inputs of shapes {shapes}; the largest takes up "
                f"to {self._bindings.profiles[-1].high}: build the engine with a wider profile"
            )
        context = self._contexts.get(profile.number)
        if context is None:
            context = self._new_context(profile, stream.handle)
            self._contexts[profile.number] = context
        inputs = []
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise EngineFailed(f"TensorRT refused shape {shape} of input {name!r}")
            inputs.append(self._inputs[name].bind(context, shape))
        outputs = {
            name: tensor.bind(context, _output_shape(context, name))
            for name, tensor in self._outputs.items()
        }
        for address, source in inputs:
            if source.nbytes:
                stream.copy_in(address, source)
        if not context.execute_async_v3(stream.handle):
            # What was enqueued may still read the buffers.
            stream.wait()
            raise EngineFailed(f"TensorRT could not run a batch of {rows} rows")
        for address, target in outputs.values():
            if target.nbytes:
                stream.copy_out(target, address)
        stream.wait()
        return {name: target for name, (_, target) in outputs.items()}

    def close(self) -> None:
        """Frees everything, in the slot's thread; a second call does nothing."""
        if not self._active:
            return
        self._active = False
        self._contexts = {}
        for tensor in (*self._inputs.values(), *self._outputs.values()):
            tensor.close()
        self._inputs, self._outputs, self._stream = {}, {}, None
        self._driver.pop()

    def _shapes(self, rows: int) -> dict[str, Shape]:
        shapes = {}
        for name, tensor in self._inputs.items():
            row = self._row_shapes.get(name)
            if row is None or tensor.host.size_bytes < tensor.size_bytes((rows, *row)):
                raise EngineFailed(f"input {name!r} was not given {rows} rows: call input_buffer")
            shapes[name] = (rows, *row)
        return shapes


def _output_shape(context: Any, name: str) -> Shape:
    shape = tuple(int(size) for size in context.get_tensor_shape(name))
    if any(size < 0 for size in shape):
        raise EngineFailed(
            f"output {name!r} has shape {shape} that depends on the data; such models need "
            "`engine: onnxruntime`"
        )
    return shape
