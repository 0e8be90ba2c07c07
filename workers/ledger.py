"""What a worker has claimed and not yet answered."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from producer.entries import Entry, Settlement


class Ledger:
    """Entries that this worker has claimed and not yet settled. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, bytes], Entry] = {}
        self._rows = 0
        #: An answer of Redis was lost: it may have delivered entries that are not in here.
        self.unsure = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def rows(self) -> int:
        """Rows of open entries."""
        return self._rows

    def entries(self) -> list[Entry]:
        """The open entries."""
        with self._lock:
            return list(self._open.values())

    def open(self, entries: list[Entry]) -> list[Entry]:
        """Adds entries; returns those that were not open already."""
        new = []
        with self._lock:
            for entry in entries:
                key = (entry.stream, entry.entry_id)
                if key not in self._open:
                    self._open[key] = entry
                    self._rows += entry.rows
                    new.append(entry)
        return new

    def settled(self, settlements: list[Settlement]) -> None:
        """Closes what was answered."""
        self.closed([settlement.entry for settlement in settlements])

    def closed(self, entries: Iterable[Entry]) -> None:
        """Closes entries."""
        with self._lock:
            for entry in entries:
                if self._open.pop((entry.stream, entry.entry_id), None) is not None:
                    self._rows -= entry.rows
