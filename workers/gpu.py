"""What NVML says of the GPU that this process uses. Without a GPU or NVML there is nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from workers.pinning import import_nvml

_MILLI = 1000.0


class GpuState(NamedTuple):
    """One reading. None: the GPU does not tell."""

    name: str
    uuid: str
    utilization_ratio: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    temperature_celsius: float | None


class GpuReader:
    """Reads one GPU or MIG device. `nvml`: the module pynvml.

    `device`: an index in bus order, as the driver's tools count, or a UUID in full.
    """

    def __init__(self, nvml: Any, device: str) -> None:
        self._nvml = nvml
        self._device = device
        self._handle: Any = None

    def start(self) -> bool:
        """Opens NVML; False if it or the GPU is not there."""
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:
            return False
        try:
            if self._device.isdigit():
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(int(self._device))
            else:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._device)
        except self._nvml.NVMLError:
            self._shut_down()
            return False
        return True

    def read(self) -> GpuState | None:
        """The state now; None before `start` or where it failed."""
        if self._handle is None:
            return None
        nvml, handle = self._nvml, self._handle
        memory = self._asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = self._asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        degrees = self._asked(
            lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        )
        return GpuState(
            str(self._asked(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
            str(self._asked(lambda: nvml.nvmlDeviceGetUUID(handle)) or ""),
            None if rates is None else rates.gpu / 100,
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            None if power is None else power / _MILLI,
            None if degrees is None else float(degrees),
        )

    def close(self) -> None:
        """Closes NVML."""
        if self._handle is not None:
            self._handle = None
            self._shut_down()

    def _shut_down(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:
            return None  # a value that this GPU or driver does not offer


def gpu_reader(device: str) -> GpuReader | None:
    """A started reader for a worker's TRTQ_DEVICE; None for the CPU or without NVML."""
    nvml = None if device == "cpu" else import_nvml()
    if nvml is None:
        return None
    reader = GpuReader(nvml, device)
    return reader if reader.start() else None
