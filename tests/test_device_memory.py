"""Memory of TensorRT slots, without a GPU."""

from __future__ import annotations

import pytest

from producer.errors import ConfigError
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
