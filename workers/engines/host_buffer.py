"""Aligned host memory that grows when needed and never shrinks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workers.engines.base import Array

#: A cache line, and the widest vector load of x86.
ALIGNMENT_BYTES = 64


class HostBuffer:
    """Memory of one tensor of a slot. Nothing is allocated before the first `array`."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        #: Address of the first element, 0 before the first `array`; changes only when it grows.
        self.address = 0
        self._memory: Array = np.empty(0, np.uint8)

    def array(self, rows: int, row_shape: tuple[int, ...]) -> Array:
        """The memory's start as a C-contiguous array (rows, *row_shape); content is undefined.

        Arrays that were handed out before a growth keep the old memory. Raises MemoryError.
        """
        shape = (rows, *row_shape)
        size = math.prod(shape) * self.dtype.itemsize
        if size > len(self._memory) or not self.address:
            self._grow(size)
        return self._memory[:size].view(self.dtype).reshape(shape)

    def rows(self, row_shape: tuple[int, ...]) -> int:
        """Rows of that shape for which there is memory now."""
        row_bytes = math.prod(row_shape) * self.dtype.itemsize
        return len(self._memory) // row_bytes if row_bytes else 1 << 31

    def _grow(self, size: int) -> None:
        # Half as much again, so that slowly growing batches do not allocate each time.
        size = max(size, len(self._memory) * 3 // 2, ALIGNMENT_BYTES)
        raw = np.empty(size + ALIGNMENT_BYTES, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT_BYTES
        self._memory = raw[offset : offset + size]
        self.address = self._memory.ctypes.data
