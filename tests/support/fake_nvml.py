"""A driver's answers without a driver: the functions of pynvml that we call, as it names them."""

# ruff: noqa: N802, N803 - the names are pynvml's

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

WORD_BITS = 64


@dataclass(frozen=True)
class FakeGpu:
    """One GPU. `cores` None: the driver does not tell; `mig` None: MIG is off."""

    uuid: str
    cores: frozenset[int] | None = frozenset()
    mig: tuple[str, ...] | None = None
    name: str = "NVIDIA H200"
    lost: bool = False


@dataclass(frozen=True)
class FakeMig:
    """One MIG device."""

    uuid: str
    gpu: FakeGpu
    name: str = "NVIDIA H200 MIG 1g.18gb"


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml:
    """Stands for the module pynvml. `driver` False: nothing answers.

    MIG devices tell no utilization, power and temperature.
    """

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, gpus: Sequence[FakeGpu] = (), *, driver: bool = True) -> None:
        self.gpus = gpus
        self.driver = driver
        self.opened = 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._check()
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._check()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._check()
        if not 0 <= index < len(self.gpus) or self.gpus[index].lost:
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | FakeMig:
        self._check()
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
            if uuid in (gpu.mig or ()):
                return FakeMig(uuid, gpu)
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeMig) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu | FakeMig) -> str:
        return handle.name

    def nvmlDeviceGetMigMode(self, device: FakeGpu) -> list[int]:
        if device.mig is None:
            raise NVMLError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: FakeGpu, index: int) -> FakeMig:
        # The first place has no device, as after one was taken away.
        if device.mig is None or not 1 <= index <= len(device.mig):
            raise NVMLError("Not Found")
        return FakeMig(device.mig[index - 1], device)

    def nvmlDeviceGetCpuAffinity(self, handle: FakeGpu, cpuSetSize: int) -> list[int]:
        if handle.cores is None:
            raise NVMLError("Not Supported")
        words = [0] * cpuSetSize
        for core in handle.cores:
            if core < cpuSetSize * WORD_BITS:
                words[core // WORD_BITS] |= 1 << core % WORD_BITS
        return words

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | FakeMig) -> Any:
        share = 1 if isinstance(handle, FakeGpu) else 7
        return SimpleNamespace(used=5 << 20, total=(140 << 30) // share)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu | FakeMig) -> Any:
        return self._of_a_gpu(handle, lambda: SimpleNamespace(gpu=50, memory=10))

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu | FakeMig) -> int:
        return int(self._of_a_gpu(handle, lambda: 250_500))

    def nvmlDeviceGetTemperature(self, handle: FakeGpu | FakeMig, sensor: int) -> int:
        return int(self._of_a_gpu(handle, lambda: 40))

    def _of_a_gpu(self, handle: FakeGpu | FakeMig, answer: Callable[[], Any]) -> Any:
        if isinstance(handle, FakeMig):
            raise NVMLError("Not Supported")
        return answer()

    def _check(self) -> None:
        if self.opened < 1:
            raise NVMLError("Uninitialized")
