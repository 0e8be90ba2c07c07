"""Memory of TensorRT slots and the choice of GPUs, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from producer.errors import ConfigError
from workers.pinning import Gpu, list_gpus
from workers.tensorrt.memory import Budget, GrowingBuffer


class Memory:
    def __init__(self, size_bytes):
        self.size_bytes, self.freed = size_bytes, 0

    def free(self):
        self.freed += 1


def test_a_buffer_grows_and_never_shrinks():
    budget = Budget(100)
    buffer = GrowingBuffer(Memory, budget)
    first = buffer.at_least(40)
    assert buffer.at_least(10) is first
    second = buffer.at_least(90)
    assert (first.freed, second.size_bytes, budget.taken_bytes) == (1, 90, 90)
    buffer.close()
    buffer.close()
    assert (second.freed, budget.taken_bytes, buffer.size_bytes) == (1, 0, 0)


def test_beyond_the_budget_nothing_is_taken_and_the_buffer_stays_usable():
    budget = Budget(100)
    buffer = GrowingBuffer(Memory, budget)
    with pytest.raises(ConfigError, match=r"101 bytes.*max_batch.*TRTQ_PINNED_LIMIT_BYTES"):
        buffer.at_least(101)
    assert budget.taken_bytes == 0
    assert buffer.at_least(100).size_bytes == 100


def test_a_failed_allocation_gives_the_budget_back():
    def fail(size_bytes):
        raise MemoryError

    budget = Budget(100)
    with pytest.raises(MemoryError):
        GrowingBuffer(fail, budget).at_least(50)
    assert budget.taken_bytes == 0


class NVMLError(Exception):
    pass


def fake_nvml():
    def mig_mode(handle):
        if handle == "a":
            raise NVMLError
        return 1, 1

    def mig_handle(handle, index):
        if index == 1:
            raise NVMLError
        return f"{handle}{index}"

    def affinity(handle, words):
        if handle == "b":
            raise NVMLError
        return [1 << 63, 0b10][:words]

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex="ab".__getitem__,
        nvmlDeviceGetUUID=lambda handle: f"UUID-{handle}".encode(),
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3,
        nvmlDeviceGetMigDeviceHandleByIndex=mig_handle,
        nvmlDeviceGetCpuAffinity=affinity,
    )


def test_gpus_are_listed_by_uuid_with_near_cores_and_mig_devices_for_their_gpu():
    none = frozenset()
    assert list_gpus(fake_nvml(), 66) == [
        Gpu("UUID-a", frozenset({63, 65})),
        Gpu("UUID-b0", none),
        Gpu("UUID-b2", none),
    ]
