"""Which GPU a worker sees and which CPU cores lie near it, asked of NVML."""

from __future__ import annotations

from typing import Any, NamedTuple

_WORD_BITS = 64


class Gpu(NamedTuple):
    """A GPU or, where MIG is on, one MIG device. `cores` is empty where NVML does not say."""

    uuid: str
    cores: frozenset[int]


def list_gpus(nvml: Any, cpu_count: int) -> list[Gpu]:
    """Every device that CUDA_VISIBLE_DEVICES can name by UUID, in NVML's (PCI bus) order.

    `nvml`: the module pynvml, initialised. A GPU with MIG on is listed as its MIG devices alone.
    Raises pynvml.NVMLError.
    """
    gpus: list[Gpu] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        cores = _near_cores(nvml, handle, cpu_count)
        handles = _mig_handles(nvml, handle) if _mig_is_on(nvml, handle) else [handle]
        gpus += [Gpu(_text(nvml.nvmlDeviceGetUUID(each)), cores) for each in handles]
    return gpus


def _mig_is_on(nvml: Any, handle: Any) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False  # GPUs without MIG answer "not supported"
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _mig_handles(nvml: Any, handle: Any) -> list[Any]:
    handles = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:
            continue  # an index without a device
    return handles


def _near_cores(nvml: Any, handle: Any, cpu_count: int) -> frozenset[int]:
    words = -(-cpu_count // _WORD_BITS)
    try:
        masks = nvml.nvmlDeviceGetCpuAffinity(handle, words)
    except nvml.NVMLError:
        return frozenset()
    return frozenset(
        core for core in range(cpu_count) if masks[core // _WORD_BITS] >> (core % _WORD_BITS) & 1
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
