"""The sizes that batches are filled up to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.tensorrt.padding import padded, padded_sizes


def test_sizes() -> None:
    assert padded_sizes(1) == [1]
    assert padded_sizes(7) == [1, 2, 3, 4, 5, 6, 7]
    assert padded_sizes(50) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 50]


@given(st.integers(1, 4096), st.data())
def test_a_size_holds_the_rows_and_wastes_a_quarter_at_most(
    max_batch: int, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, max_batch))
    size = padded(rows, padded_sizes(max_batch))
    assert rows <= size <= min(max_batch, max(8, rows * 1.25))


def test_more_than_the_largest_stays() -> None:
    assert padded(20, padded_sizes(16)) == 20
    assert padded(3, ()) == 3
