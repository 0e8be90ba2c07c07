"""The GPUs of this machine and the CPU cores near each, asked of NVML."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from producer.errors import NoDevice

_WORD_BITS = 64


@dataclass(frozen=True)
class Gpu:
    """A GPU. `index` is its place in NVML's order, which is that of the PCI bus."""

    index: int
    uuid: str
    name: str
    #: CPU cores near it, of those that this process may use; empty where NVML does not say.
    cores: frozenset[int]
    #: UUIDs of its MIG devices, which alone can be used then; None where MIG is off.
    mig_uuids: tuple[str, ...] | None

    @property
    def usable_uuids(self) -> tuple[str, ...]:
        """What CUDA_VISIBLE_DEVICES can name of it: itself, or its MIG devices."""
        return (self.uuid,) if self.mig_uuids is None else self.mig_uuids


def import_nvml() -> Any | None:
    """The module pynvml; None where the package nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def find_gpus() -> list[Gpu] | None:
    """The GPUs of this machine, also those that CUDA_VISIBLE_DEVICES hides; None without pynvml.

    Raises NoDevice if no driver answers. CUDA is not initialised.
    """
    nvml = import_nvml()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        try:
            return list_gpus(nvml, os.sched_getaffinity(0))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as failure:
        raise NoDevice(
            f"no NVIDIA driver answers ({failure}): without a GPU the device is cpu (--devices "
            "cpu, or TRTQ_DEVICE=cpu)"
        ) from failure


def list_gpus(nvml: Any, allowed_cores: Iterable[int]) -> list[Gpu]:
    """Every GPU that answers, in NVML's order. `nvml`: the module pynvml, initialised.

    `allowed_cores` are the CPU cores that this process may use. Raises pynvml.NVMLError.
    """
    allowed = frozenset(allowed_cores)
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(nvml, index, allowed))
        except nvml.NVMLError:
            continue  # lost, or without permission: the others can still be used
    return gpus


def _gpu(nvml: Any, index: int, allowed: frozenset[int]) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetUUID(handle)),
        _text(nvml.nvmlDeviceGetName(handle)),
        _near_cores(nvml, handle, allowed),
        _mig_uuids(nvml, handle) if _mig_is_on(nvml, handle) else None,
    )


def _mig_is_on(nvml: Any, handle: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False  # GPUs without MIG answer "not supported"
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _mig_uuids(nvml: Any, handle: Any) -> tuple[str, ...]:
    uuids = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            continue  # an index without a device
        uuids.append(_text(nvml.nvmlDeviceGetUUID(device)))
    return tuple(uuids)


def _near_cores(nvml: Any, handle: Any, allowed: frozenset[int]) -> frozenset[int]:
    core_count = max(max(allowed, default=0) + 1, os.cpu_count() or 1)
    words = -(-core_count // _WORD_BITS)
    try:
        masks = nvml.nvmlDeviceGetCpuAffinity(handle, words)
    except nvml.NVMLError:
        return frozenset()
    return frozenset(
        core for core in allowed if masks[core // _WORD_BITS] >> (core % _WORD_BITS) & 1
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
