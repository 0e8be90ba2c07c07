"""A recording stand-in for the CUDA driver and a TensorRT plan: device memory is a dict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from producer.errors import OutOfDeviceMemory
from workers.engines.base import Array


class FakeMemory:
    """Pinned or device memory."""

    def __init__(self, driver: FakeDriver, kind: str, size_bytes: int, address: int) -> None:
        self._driver, self._kind = driver, kind
        self.address = address
        self.array: Array = np.full(size_bytes, 0xA5, np.uint8)

    def free(self) -> None:
        """Frees once; a second time is an error."""
        self._driver.live[self._kind].remove(id(self))


class FakeStream:
    """Runs everything at once and notes it."""

    handle = 7

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def copy_in(self, address: int, source: Array) -> None:
        """Host to device."""
        assert source.flags.c_contiguous
        raw = source.reshape(-1).view(np.uint8)
        self._driver.at[address].array[: raw.size] = raw
        self._driver.calls.append(("copy_in", source.shape))

    def copy_out(self, target: Array, address: int) -> None:
        """Device to host."""
        raw = target.reshape(-1).view(np.uint8)
        raw[...] = self._driver.at[address].array[: raw.size]
        self._driver.calls.append(("copy_out", target.shape))

    def mark(self, number: int) -> None:
        """The four marks come in order."""
        self._driver.marks.append(number)

    def lap_ms(self) -> tuple[float, float, float]:
        """Times that tell them apart."""
        return 1.0, 2.0, 3.0

    def wait(self) -> None:
        """Nothing is pending."""
        self._driver.calls.append(("wait",))


class FakeDriver:
    """One device with `device_bytes` of memory."""

    def __init__(self, device_bytes: int = 1 << 30) -> None:
        self.device_bytes = device_bytes
        self.calls: list[tuple[Any, ...]] = []
        self.live: dict[str, list[int]] = {"pinned": [], "device": []}
        self.at: dict[int, FakeMemory] = {}
        self.marks: list[int] = []
        self.depth = 0
        self.opened = 0
        self._kept: list[FakeMemory] = []

    def open(self) -> None:
        """Takes the context."""
        self.opened += 1

    def push(self) -> None:
        """Into this thread."""
        self.depth += 1

    def pop(self) -> None:
        """Out of it."""
        self.depth -= 1

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total."""
        return self.device_bytes, self.device_bytes

    def pinned(self, size_bytes: int) -> FakeMemory:
        """Host memory."""
        return self._allocate("pinned", size_bytes)

    def device(self, size_bytes: int) -> FakeMemory:
        """Device memory, while there is some."""
        if size_bytes > self.device_bytes:
            raise OutOfDeviceMemory(f"no room for {size_bytes} bytes of device memory")
        memory = self._allocate("device", size_bytes)
        self.at[memory.address] = memory
        return memory

    def stream(self) -> FakeStream:
        """A stream."""
        return FakeStream(self)

    def close(self) -> None:
        """Lets go."""
        self.opened -= 1

    def _allocate(self, kind: str, size_bytes: int) -> FakeMemory:
        assert self.depth > 0, "no context is current"
        memory = FakeMemory(self, kind, size_bytes, 4096 * (1 + len(self._kept)))
        self._kept.append(memory)
        self.live[kind].append(id(memory))
        self.calls.append((kind, size_bytes))
        return memory


class FakeContext:
    """An execution context of a plan that doubles float32 rows of four numbers."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._shape: tuple[int, ...] = ()
        self._addresses: dict[str, int] = {}
        self.refuses = False
        self.profile = -1

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        """Chooses a profile."""
        self.profile = number
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Notes the shape."""
        self._shape = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        """Notes the address."""
        self._addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """The output has the input's shape."""
        return self._shape

    def execute_async_v3(self, stream: int) -> bool:
        """Doubles."""
        self._driver.calls.append(("execute", self.profile, self._shape))
        if self.refuses:
            return False
        size = int(np.prod(self._shape)) * 4
        source = self._driver.at[self._addresses["x"]].array[:size].view(np.float32)
        self._driver.at[self._addresses["y"]].array[:size].view(np.float32)[...] = source * 2
        return True


class FakePlan:
    """ICudaEngine as far as the code asks it: two profiles, up to 4 and up to 16 rows."""

    num_io_tensors = 2
    num_optimization_profiles = 2
    device_memory_size_v2 = 1000

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.contexts: list[FakeContext] = []

    def get_tensor_name(self, index: int) -> str:
        """x, y."""
        return "xy"[index]

    def get_tensor_dtype(self, name: str) -> Any:
        """float32."""
        return SimpleNamespace(name="FLOAT")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Rows of four."""
        return (-1, 4)

    def get_tensor_mode(self, name: str) -> str:
        """x comes in."""
        return "in" if name == "x" else "out"

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        """The largest profile comes first, so that an order has to be made."""
        return [(1, 4), ((16, 4) if index == 0 else (4, 4)), ((16, 4) if index == 0 else (4, 4))]

    def create_execution_context(self) -> FakeContext:
        """Another context."""
        self.contexts.append(FakeContext(self._driver))
        return self.contexts[-1]


class FakeModule:
    """The TensorRT module."""

    TensorIOMode = SimpleNamespace(INPUT="in", OUTPUT="out")

    class ILogger:
        """Base of the logger."""

        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3, VERBOSE=4)

    def __init__(self, driver: FakeDriver) -> None:
        self.plan = FakePlan(driver)

    def Runtime(self, logger: Any) -> Any:  # noqa: N802 - TensorRT's own name
        """Reads the plan b"plan" and nothing else."""
        plan = self.plan
        return SimpleNamespace(
            deserialize_cuda_engine=lambda data: plan if data == b"plan" else None
        )
