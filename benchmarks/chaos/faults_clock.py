"""Wall clocks that jump by an hour: those of workers and clients, and that of Redis."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.judge import check, judge
from benchmarks.chaos.rig import Rig
from tests.support.stepped_redis import stepped_redis

_STEP_S = 3600


def clock_stepped(folder: Path, seconds: float) -> dict[str, Any]:
    """`time.time` of all workers and clients goes an hour on, then an hour back from the start."""
    clock = folder / "clock"
    clock.write_text("0")
    env = {"CHAOS_CLOCK": str(clock)}
    with Rig(folder, env=env, client_env=env) as rig:
        rig.load(seconds)
        _step(clock, seconds)
        clients = rig.loaded(seconds)
        row = judge("clocks of workers and clients step 1 h", clients, seconds, **rig.counters())
        check(row, row["reclaimed"] == 0, f"{row['reclaimed']} tasks were taken for abandoned")
        check(row, row["max_ms"] < 5000, "tasks waited")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def redis_clock_stepped(folder: Path, seconds: float) -> dict[str, Any]:
    """The same step of the clock of Redis' machine, all workers killed before each."""
    clock = folder / "clock"
    server = stepped_redis(clock)
    with Rig(folder, server=server) as rig:
        rig.load(seconds)
        offsets_s: list[int] = []
        killed = 0
        for step_s in (_STEP_S, -_STEP_S):
            time.sleep(seconds / 4)
            # All workers die in mid-batch, and by the new clock their marks are of the future.
            killed += rig.kill_all()
            clock.write_text(str(step_s))
            time.sleep(seconds / 4)
            offsets_s.append(round(rig.raw.time()[0] - time.time()))
        clients = rig.loaded(seconds)
        # By Redis' clock every open task is an hour old after the step on.
        row = judge(
            "clock of Redis steps 1 h, workers killed",
            clients,
            seconds,
            allowed=("deadline_exceeded",),
            redis_offsets_s=offsets_s,
            killed=killed,
            **rig.counters(),
        )
        stepped = [abs(offset_s) > _STEP_S / 2 for offset_s in offsets_s]
        check(row, killed > 0, "no worker was killed with work in its hands")
        check(row, stepped == [True, True], f"Redis' clock was off by {offsets_s} s")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def _step(clock: Path, seconds: float) -> None:
    for step_s in (_STEP_S, -_STEP_S):
        time.sleep(seconds / 3)
        clock.write_text(str(step_s))
