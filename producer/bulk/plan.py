"""Which rows make which task, and which of them are done: a bit per chunk, ranges on demand."""

from __future__ import annotations

from collections.abc import Iterator


class ChunkPlan:
    """Rows 0 to `rows` cut into chunks of `rows_per_task`; the last one may be shorter."""

    def __init__(self, rows: int, rows_per_task: int) -> None:
        self.rows = rows
        self.rows_per_task = rows_per_task
        self.chunks = -(-rows // rows_per_task)
        self.done_rows = 0
        self._done = bytearray(-(-self.chunks // 8))

    def range(self, chunk: int) -> tuple[int, int]:
        """First row of a chunk and the row after its last."""
        start = chunk * self.rows_per_task
        return start, min(start + self.rows_per_task, self.rows)

    def is_done(self, chunk: int) -> bool:
        """True once `mark_done` was called for it."""
        return bool(self._done[chunk >> 3] & (1 << (chunk & 7)))

    def mark_done(self, chunk: int) -> None:
        """Notes that every row of the chunk is in the output; more than once is harmless."""
        if not self.is_done(chunk):
            self._done[chunk >> 3] |= 1 << (chunk & 7)
            start, stop = self.range(chunk)
            self.done_rows += stop - start

    def mark_all_done(self) -> None:
        """Notes that the job had ended."""
        self._done = bytearray(b"\xff" * len(self._done))
        self.done_rows = self.rows

    def pending(self) -> Iterator[int]:
        """Chunks not done when the iterator comes to them, in file order."""
        return (chunk for chunk in range(self.chunks) if not self.is_done(chunk))
