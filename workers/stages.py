"""How long the stages of a model's work take, how large its batches are, and why tasks fail."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from workers.engines.base import RUN_STAGES

#: Upper bounds of the buckets of every duration, in ms; a last bucket takes what is longer.
MS_BOUNDS = (
    *(0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0),
    *(100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 60_000.0),
)
#: Upper bounds of the buckets of batch sizes, in rows.
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

#: From Redis' acceptance of a task until a worker claims it; one observation a task.
QUEUE_WAIT = "queue_wait"
#: In the worker, from the claim of a batch's first task until a slot takes the batch.
HOLD = "hold"
GATHER = "gather"
RUN = "run"
SCATTER = "scatter"
#: One settle: answers, acknowledgements and deletions of one or more batches.
REPLY = "reply"
#: RUN_STAGES are within `run`, from models with hooks and engines that measure the device.
STAGES = (QUEUE_WAIT, HOLD, GATHER, RUN, *RUN_STAGES, SCATTER, REPLY)


class HistogramState(NamedTuple):
    """Counts of a histogram. `counts` has one entry a bound and a last one for all above."""

    bounds: Sequence[float]
    counts: tuple[int, ...]
    total: float

    @property
    def observations(self) -> int:
        """Observations."""
        return sum(self.counts)


class Histogram:
    """Counts by fixed buckets. Thread-safe; an observation costs about half a microsecond."""

    __slots__ = ("_bounds", "_counts", "_lock", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Counts one value."""
        place = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[place] += 1
            self._total += value

    def observe_many(self, values: Iterable[float]) -> None:
        """Counts many values under one lock; cheap where few of them differ."""
        bounds, counts = self._bounds, self._counts
        with self._lock:
            for value, times in Counter(values).items():
                counts[bisect_left(bounds, value)] += times
                self._total += value * times

    def state(self) -> HistogramState:
        """The counts now, all of one moment."""
        with self._lock:
            return HistogramState(self._bounds, tuple(self._counts), self._total)


class Stages:
    """What one model in one process measures. Thread-safe."""

    def __init__(self) -> None:
        self._durations = {stage: Histogram(MS_BOUNDS) for stage in STAGES}
        self._batches = Histogram(ROW_BOUNDS)
        self._failures: dict[str, int] = {}
        self._lock = threading.Lock()

    def observe(self, stage: str, ms: float) -> None:
        """One stage took `ms`; raises KeyError for a stage that is none of STAGES."""
        self._durations[stage].observe(ms)

    def observe_many(self, stage: str, ms: Iterable[float]) -> None:
        """As `observe`, for many at once."""
        self._durations[stage].observe_many(ms)

    def batch(self, rows: int) -> None:
        """A batch of `rows` rows has run."""
        self._batches.observe(rows)

    def failure(self, code: str) -> None:
        """A task ends with the error `code`."""
        with self._lock:
            self._failures[code] = self._failures.get(code, 0) + 1

    def durations(self) -> dict[str, HistogramState]:
        """By stage, in ms; every stage is there, also one that was never observed."""
        return {stage: histogram.state() for stage, histogram in self._durations.items()}

    def batches(self) -> HistogramState:
        """Batch sizes in rows."""
        return self._batches.state()

    def failures(self) -> dict[str, int]:
        """Failed tasks by error code."""
        with self._lock:
            return dict(self._failures)
