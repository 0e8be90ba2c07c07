"""The soak's own judgement: a leak is seen, noise is not."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import redis

from benchmarks.watched import Watch, slope_per_min


def test_slope_follows_a_leak_and_not_outliers() -> None:
    dice = random.Random(1)
    flat = [(float(s), 100 + dice.random()) for s in range(240)]
    leak = [(at_s, mib + at_s / 60) for at_s, mib in flat]
    peaks = [(at_s, 500.0 if at_s % 40 < 2 else mib) for at_s, mib in flat]
    assert slope_per_min(flat) == pytest.approx(0, abs=0.1)
    assert slope_per_min(leak) == pytest.approx(1, abs=0.1)
    assert slope_per_min(peaks) == pytest.approx(0, abs=0.1)
    assert slope_per_min(flat[:3]) == 0


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """File descriptors that are closed in the end."""
    descriptors: list[int] = []
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_files_that_stay_open_are_seen(connection: redis.Redis, opened: list[int]) -> None:
    watch = Watch({"me": os.getpid()}, connection)
    for _ in range(9):
        watch.sample()
        opened.append(os.open(os.devnull, os.O_RDONLY))
    growth = watch.growth(0.0)["me"]
    assert growth.files_grown == 6
    assert growth.threads_grown == 0
    assert growth.rss_mib > 1
    assert watch.redis_memory(0.0)[0] > 0
