"""A short look at every fuzz target in each test run; `make fuzz` looks for minutes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producer.errors import CorruptMessage
from tests.fuzz import judge
from tests.fuzz.judge import Score, Target, examine, measured
from tests.fuzz.mutate import mutate
from tests.fuzz.targets import targets
from tests.support.processes import ROOT

TARGETS = targets()
EACH = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())


@pytest.fixture(scope="module", autouse=True)
def traced() -> Iterator[None]:
    with measured(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@EACH
def test_known_inputs(target: Target) -> None:
    score = Score()
    for data in [*target.seeds(), *target.hostile()]:
        score.add(target, data, examine(target, data))
    assert score.crashes == {}
    assert score.peak_of_bound <= 1


@EACH
def test_some_seed_is_accepted(target: Target) -> None:
    outcomes = [examine(target, data) for data in target.seeds()]
    assert any(not outcome.refused and not outcome.crash for outcome in outcomes)


@EACH
def test_garbage_and_mutations(target: Target) -> None:
    seeds = target.seeds()
    mutated = st.builds(
        lambda seed, number: mutate(seed, seeds, random.Random(number), 4096),
        st.sampled_from(seeds),
        st.integers(0, 2**32),
    )

    @settings(
        max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(st.binary(max_size=300) | mutated)
    def look(data: bytes) -> None:
        assert examine(target, data).crash == ""

    look()


def refuse(message: str) -> Callable[[bytes], None]:
    def run(_: bytes) -> None:
        raise CorruptMessage(message)

    return run


def fail(_: bytes) -> None:
    raise KeyError("k")


def compute(_: bytes) -> None:
    end_s = time.process_time() + 0.02
    while time.process_time() < end_s:
        pass


@pytest.mark.parametrize(
    ("run", "refused", "crash"),
    [
        (len, False, ""),
        (refuse("short"), True, ""),
        (refuse("x" * 20_000), True, "a message of more than"),
        (fail, False, "KeyError at"),
        (lambda data: bytes(20 << 20), False, "more memory than the bound"),
        (compute, False, "more than 0.01 s of processor time"),
    ],
)
def test_what_counts_as_a_crash(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[bytes], object], refused: bool, crash: str
) -> None:
    monkeypatch.setattr(judge, "LIMIT_S", 0.01)
    target = Target("t", run, lambda: [b""], list, 100)
    outcome = examine(target, b"data")
    assert outcome.refused == refused
    assert outcome.crash.startswith(crash)
    assert bool(outcome.crash) == bool(crash)
    score = Score()
    score.add(target, b"data", outcome)
    assert list(score.crashes.values()) == [b"data".hex()] * bool(crash)


def test_the_runner(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", "0.5", "--engine", "mutations"]
    command += ["--target", "cancellation mark", "--target", "npy header"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "fuzz.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "fuzz.json").read_text())
    assert figures["engine"] == "mutations"
    assert figures["crashes"] == 0
    assert set(figures["targets"]) == {"cancellation mark", "npy header"}
    assert all(target["inputs"] > 20 for target in figures["targets"].values())
    assert "npy header" in done.stdout
