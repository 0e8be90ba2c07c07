"""Histograms of stages: exact counts, also from several threads, and cheap."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.stages import MS_BOUNDS, STAGES, Histogram, Stages


@given(st.lists(st.floats(0, 1e6)))
def test_every_value_is_in_the_bucket_of_its_bound(values: list[float]) -> None:
    histogram = Histogram(MS_BOUNDS)
    for value in values:
        histogram.observe(value)
    together = Histogram(MS_BOUNDS)
    together.observe_many(values)
    state = histogram.state()
    assert state.counts == together.state().counts
    assert together.state().total == pytest.approx(state.total)
    assert state.observations == len(values)
    assert state.total == pytest.approx(sum(values))
    for place, bound in enumerate(MS_BOUNDS):
        assert sum(state.counts[: place + 1]) == sum(value <= bound for value in values)


def test_threads_lose_no_observation() -> None:
    stages = Stages()

    def work() -> None:
        for _ in range(5000):
            stages.observe("run", 1.0)
            stages.failure("engine_failed")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stages.durations()["run"].observations == 20_000
    assert stages.failures() == {"engine_failed": 20_000}


def test_an_unknown_stage_is_refused_and_all_known_are_there() -> None:
    stages = Stages()
    with pytest.raises(KeyError):
        stages.observe("no such stage", 1.0)
    assert set(stages.durations()) == set(STAGES)
    assert stages.batches().observations == 0
