"""The CUDA driver as the slots use it, by PyCUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from producer.errors import DeviceLost, EngineFailed, OutOfDeviceMemory
from workers.engines.base import Array
from workers.tensorrt.device import opened_cuda

#: Parts of driver messages after which the context, and so the process, is of no more use. See
#: "CUresult" in the CUDA driver API reference: these errors are sticky.
_STICKY = (
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "launch failed",
    "launch timed out",
    "uncorrectable ECC",
    "hardware stack error",
    "assert",
    "device lost",
    "unavailable",
    "context is destroyed",
)


class PinnedMemory(Protocol):
    """Page-locked host memory; `array` is all of it as uint8."""

    array: Array

    def free(self) -> None:
        """Give it back."""


class DeviceMemory(Protocol):
    """Memory of the device at `address`."""

    address: int

    def free(self) -> None:
        """Give it back."""


class Stream(Protocol):
    """A stream with events for four marks; `handle` is the cudaStream_t as a number."""

    handle: int

    def copy_in(self, address: int, source: Array) -> None:
        """Enqueue a copy of C-contiguous pinned memory to the device."""

    def copy_out(self, target: Array, address: int) -> None:
        """Enqueue a copy from the device into C-contiguous pinned memory."""

    def mark(self, number: int) -> None:
        """Note the time at which the device comes to this place; `number` is 0 to 3."""

    def lap_ms(self) -> tuple[float, float, float]:
        """Device time in ms between the marks of what was waited for last."""

    def wait(self) -> None:
        """Block, without spinning, until all that was enqueued is done."""


class Driver(Protocol):
    """One device. Every call but `open` needs the context: `push` it in each thread first."""

    def open(self) -> None:
        """Take the device's primary context. Raises MissingExtra, NoDevice."""

    def push(self) -> None:
        """Make the context current in this thread."""

    def pop(self) -> None:
        """Undo `push`."""

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total memory of the device."""

    def pinned(self, size_bytes: int) -> PinnedMemory:
        """Page-locked host memory. Raises OutOfDeviceMemory."""

    def device(self, size_bytes: int) -> DeviceMemory:
        """Device memory. Raises OutOfDeviceMemory."""

    def stream(self) -> Stream:
        """A stream of its own, not synchronized with the default stream."""

    def close(self) -> None:
        """Let go of the context."""


@contextmanager
def current(driver: Driver) -> Iterator[None]:
    """The driver's context, current in this thread while the block runs."""
    driver.push()
    try:
        yield
    finally:
        driver.pop()


class PyCudaDriver:
    """The first device of CUDA_VISIBLE_DEVICES, by PyCUDA. `open` must come after any fork."""

    def __init__(self) -> None:
        self._cuda: Any = None
        self._context: Any = None

    def open(self) -> None:
        """Initialises CUDA and retains the primary context."""
        with opened_cuda() as cuda:
            self._context = cuda.Device(0).retain_primary_context()
        self._cuda = cuda

    def push(self) -> None:
        """Makes the context current in this thread."""
        self._context.push()

    def pop(self) -> None:
        """Undoes `push`."""
        self._context.pop()

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total memory of the device."""
        free, total = self._cuda.mem_get_info()
        return int(free), int(total)

    def pinned(self, size_bytes: int) -> _Pinned:
        """Page-locked host memory."""
        with self._named(f"{size_bytes} bytes of pinned memory"):
            return _Pinned(self._cuda.pagelocked_empty(size_bytes, np.uint8))

    def device(self, size_bytes: int) -> _Device:
        """Device memory."""
        with self._named(f"{size_bytes} bytes of device memory"):
            return _Device(self._cuda.mem_alloc(size_bytes))

    def stream(self) -> _Stream:
        """A stream with events that block instead of spinning."""
        with self._named("a stream"):
            return _Stream(self._cuda)

    def close(self) -> None:
        """Lets go of the context; the last owner's release frees it."""
        if self._context is not None:
            self._context.detach()
            self._context = None

    def _named(self, what: str) -> _Named:
        return _Named(self._cuda, what)


class _Named:
    """Errors of CUDA within the block, as ours. Entered several times for each batch."""

    __slots__ = ("_cuda", "_what")

    def __init__(self, cuda: Any, what: str) -> None:
        self._cuda = cuda
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if failure is None or not isinstance(failure, self._cuda.Error):
            return
        text = str(failure)
        if isinstance(failure, self._cuda.MemoryError):
            raise OutOfDeviceMemory(
                f"no room for {self._what}: lower the model's slots or max_batch ({text})"
            ) from failure
        if any(part in text for part in _STICKY):
            raise DeviceLost(f"the GPU failed at {self._what}: {text}") from failure
        raise EngineFailed(f"CUDA refused {self._what}: {text}") from failure


class _Pinned:
    def __init__(self, array: Any) -> None:
        self.array: Array = array

    def free(self) -> None:
        base: Any = self.array.base
        self.array = np.empty(0, np.uint8)
        base.free()


class _Device:
    def __init__(self, allocation: Any) -> None:
        self._allocation = allocation
        self.address = int(allocation)

    def free(self) -> None:
        self._allocation.free()


class _Stream:
    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream()
        self._marks = [cuda.Event() for _ in range(4)]
        flags = cuda.event_flags.BLOCKING_SYNC | cuda.event_flags.DISABLE_TIMING
        self._done = cuda.Event(flags)
        self.handle = int(self._stream.handle)
        self._copying_in = _Named(cuda, "a copy to the device")
        self._copying_out = _Named(cuda, "a copy from the device")
        self._marking = _Named(cuda, "an event")
        self._timing = _Named(cuda, "the times of a batch")
        self._waiting = _Named(cuda, "the end of a batch")

    def copy_in(self, address: int, source: Array) -> None:
        with self._copying_in:
            self._cuda.memcpy_htod_async(address, source, self._stream)

    def copy_out(self, target: Array, address: int) -> None:
        with self._copying_out:
            self._cuda.memcpy_dtoh_async(target, address, self._stream)

    def mark(self, number: int) -> None:
        with self._marking:
            self._marks[number].record(self._stream)

    def lap_ms(self) -> tuple[float, float, float]:
        first, second, third, fourth = self._marks
        with self._timing:
            return (
                float(first.time_till(second)),
                float(second.time_till(third)),
                float(third.time_till(fourth)),
            )

    def wait(self) -> None:
        with self._waiting:
            self._done.record(self._stream)
            self._done.synchronize()
