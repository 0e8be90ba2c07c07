"""What a worker process counts. The heartbeat publishes it; a turn reports its share."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Totals of one model in one process since its start.

    Written by slot, turn and reply threads under the interpreter lock; a count may be seen one
    step late, never torn.
    """

    tasks: int = 0
    rows: int = 0
    batches: int = 0
    padded_rows: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    dropped: int = 0
    reclaimed: int = 0
    released: int = 0
    poisoned: int = 0
    corrupt: int = 0

    def batch(self, rows: int, padded_rows: int = 0) -> None:
        """One batch of `rows` rows has run, filled up with `padded_rows` more that nobody sees."""
        self.batches += 1
        self.rows += rows
        self.padded_rows += padded_rows

    def copy(self) -> Counters:
        """The counts now."""
        return Counters(*(getattr(self, field.name) for field in fields(self)))

    def since(self, before: Counters) -> Counters:
        """What was counted since `before`."""
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def add(self, other: Counters) -> None:
        """Sums `other` into this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
