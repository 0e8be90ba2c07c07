"""Memory, threads and open files of processes over time, and whether they grow."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil
import redis

_MIB = 2**20
_GROUP = 5


class Growth(NamedTuple):
    """What a process had in the last part of a watch, and how that had changed."""

    rss_mib: float
    rss_mib_per_min: float
    threads: int
    threads_grown: int
    files: int
    files_grown: int


class Watch:
    """Samples of the processes given by name and pid, and of Redis' memory."""

    def __init__(self, pids: Mapping[str, int], connection: redis.Redis) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._redis = connection
        self._samples: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
        self._redis_bytes: list[tuple[float, float]] = []
        self._start_s = time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._start_s

    def sample(self) -> None:
        """One sample of everything; raises psutil.NoSuchProcess if a process has ended."""
        at_s = self.age_s
        for name, process in self._processes.items():
            with process.oneshot():
                rss = process.memory_info().rss / _MIB
                self._samples[name].append((at_s, rss, process.num_threads(), process.num_fds()))
        memory = self._redis.info("memory")
        self._redis_bytes.append((at_s, memory["used_memory"] / _MIB))

    def growth(self, from_s: float) -> dict[str, Growth]:
        """Of each process, from `from_s` on."""
        found = {}
        for name, samples in self._samples.items():
            late = [sample for sample in samples if sample[0] >= from_s]
            third = max(1, len(late) // 3)
            first, last = late[:third], late[-third:]
            threads, files = (
                [int(statistics.median(sample[place] for sample in part)) for part in (first, last)]
                for place in (2, 3)
            )
            found[name] = Growth(
                statistics.median(rss for _, rss, _, _ in last),
                slope_per_min([(at_s, rss) for at_s, rss, _, _ in late]),
                threads[1],
                threads[1] - threads[0],
                files[1],
                files[1] - files[0],
            )
        return found

    def redis_memory(self, from_s: float) -> tuple[float, float]:
        """Median MiB that Redis used from `from_s` on, and its slope in MiB/min."""
        late = [sample for sample in self._redis_bytes if sample[0] >= from_s]
        return statistics.median(mib for _, mib in late), slope_per_min(late)


def slope_per_min(samples: Sequence[tuple[float, float]]) -> float:
    """Growth a minute of (seconds, value): the median slope of all pairs (Theil-Sen).

    It does not follow outliers. Neighbours are grouped first.
    """
    groups = [samples[i : i + _GROUP] for i in range(0, len(samples), _GROUP)]
    points = [
        (statistics.fmean(at for at, _ in group), statistics.median(value for _, value in group))
        for group in groups
    ]
    slopes = [
        (after - before) / (to - since)
        for number, (since, before) in enumerate(points)
        for to, after in points[number + 1 :]
    ]
    return 60 * statistics.median(slopes) if slopes else 0.0
