"""Batch sizes that are run: others are filled up, so that few graphs and kernels serve them all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: Sizes between two powers of two; filling up adds a quarter of the rows at most.
_STEPS = 4


def padded_sizes(max_batch: int) -> list[int]:
    """1, 2, 3 ... 8, 10, 12, 14, 16, 20 ... up to and with `max_batch`."""
    sizes = {max_batch}
    size, step = 1, 1
    while size < max_batch:
        sizes.add(size)
        if size >= 2 * _STEPS * step:
            step *= 2
        size += step
    return sorted(sizes)


def padded(rows: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` (sorted) that holds `rows`; `rows` where none does."""
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else rows
