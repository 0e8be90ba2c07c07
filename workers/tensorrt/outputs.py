"""Outputs whose shape depends on the data: memory is given while the batch runs."""

from __future__ import annotations

from typing import Any

from producer.errors import TrtqError
from workers.tensorrt.cuda import DeviceMemory
from workers.tensorrt.memory import GrowingBuffer
from workers.tensorrt.profiles import Shape


class OutputAllocator:
    """Gives TensorRT memory of `buffer` for one output of one slot, and notes its shape.

    `native` is TensorRT's IOutputAllocator, which the execution context keeps.
    """

    def __init__(self, module: Any, buffer: GrowingBuffer[DeviceMemory]) -> None:
        self._buffer = buffer
        self._shape: Shape | None = None
        #: Why memory was refused; TensorRT itself only sees an address of 0.
        self.failure: TrtqError | None = None
        self.native = _native(module, self)

    def begin(self) -> None:
        """Forgets the last batch."""
        self._shape, self.failure = None, None

    def allocate(self, size_bytes: int) -> int:
        """The address of `size_bytes`; 0 if there is no memory."""
        try:
            return self._buffer.at_least(max(1, size_bytes)).address
        except TrtqError as failure:
            self.failure = failure
            return 0

    def note(self, shape: Shape) -> None:
        """The batch's output has this shape."""
        self._shape = shape

    @property
    def shape(self) -> Shape | None:
        """Shape of the last batch's output; None before TensorRT told it."""
        return self._shape


def _native(module: Any, owner: OutputAllocator) -> Any:
    base: Any = module.IOutputAllocator

    class Native(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)

        def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
            # cuMemAlloc aligns to 256 bytes, which is what TensorRT asks for.
            return owner.allocate(int(size))

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, stream: int
        ) -> int:
            return owner.allocate(int(size))

        def notify_shape(self, name: str, shape: Any) -> None:
            owner.note(tuple(int(length) for length in shape))

    return Native()
