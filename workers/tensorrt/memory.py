"""Buffers that only grow, and the budget that pinned memory is taken from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from producer.errors import ConfigError


class Allocation(Protocol):
    """Memory that its owner frees."""

    def free(self) -> None:
        """Give the memory back."""


Memory = TypeVar("Memory", bound=Allocation)


class Budget:
    """Bytes that all slots of a process may take together. Safe from several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        """What is taken now."""
        return self._taken_bytes

    def take(self, size_bytes: int) -> None:
        """Takes `size_bytes`; raises ConfigError, taking nothing, when they are not left."""
        with self._lock:
            if self._taken_bytes + size_bytes > self._limit_bytes:
                raise ConfigError(
                    f"{size_bytes} bytes of pinned memory more than the {self._taken_bytes} taken"
                    f" exceed the limit of {self._limit_bytes}; lower the model's slots or"
                    " max_batch, or raise TRTQ_PINNED_LIMIT_BYTES"
                )
            self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Gives back what `take` took."""
        with self._lock:
            self._taken_bytes -= size_bytes


class GrowingBuffer(Generic[Memory]):
    """One allocation, replaced by a larger one when needed and never shrunk. One thread only."""

    def __init__(self, allocate: Callable[[int], Memory], budget: Budget | None = None) -> None:
        self._allocate = allocate
        self._budget = budget
        self._memory: Memory | None = None
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes held now."""
        return self._size_bytes

    def at_least(self, size_bytes: int) -> Memory:
        """Memory of `size_bytes` or more; the content is undefined after it grew.

        The old memory is freed first, so both never exist at once. Raises what the allocator and
        the budget raise; the buffer is empty then, and usable again.
        """
        if self._memory is not None and size_bytes <= self._size_bytes:
            return self._memory
        self.close()
        if self._budget is not None:
            self._budget.take(size_bytes)
        try:
            memory = self._allocate(size_bytes)
        except BaseException:
            if self._budget is not None:
                self._budget.give_back(size_bytes)
            raise
        self._memory, self._size_bytes = memory, size_bytes
        return memory

    def close(self) -> None:
        """Frees the memory; a second call does nothing."""
        if self._memory is None:
            return
        memory, size_bytes = self._memory, self._size_bytes
        self._memory, self._size_bytes = None, 0
        memory.free()
        if self._budget is not None:
            self._budget.give_back(size_bytes)
