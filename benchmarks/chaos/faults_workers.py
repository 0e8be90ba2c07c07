"""Workers that are killed, asked to stop, or stopped and woken up."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.judge import check, judge
from benchmarks.chaos.rig import Rig

_LEASE_S = 1.5
_LONG_LEASE_S = 60
_GRACE_S = 10


def worker_killed(folder: Path, seconds: float) -> dict[str, Any]:
    """SIGKILL of one worker after the other in mid-batch; supervisors start new ones."""
    with Rig(folder) as rig:
        rig.load(seconds)
        kills = 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            # The supervisor's pauses grow with each death; tasks must not wait for their sum.
            time.sleep(max(1.0, seconds / 8))
            victim = rig.busy(1.0)
            if victim is not None:
                victim.kill()
                kills += 1
        clients = rig.loaded(seconds)
        row = judge("worker SIGKILL in mid-batch", clients, seconds, kills=kills)
        row["exit_codes"] = rig.stop_workers()
        check(row, kills > 0, "no worker was killed with work in its hands")
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def worker_stopped(folder: Path, seconds: float) -> dict[str, Any]:
    """SIGTERM with work in flight: what is not started is handed back, no lease has to run out."""
    # Batches of 100 ms, so that some tasks wait behind one that runs.
    env = {"TRTQ_LEASE_MS": str(_LONG_LEASE_S * 1000), "CHAOS_RUN_MS": "100"}
    with Rig(folder, env=env) as rig:
        rig.load(seconds)
        stops: list[float] = []
        codes: list[int] = []
        while len(stops) < max(2, int(seconds / 4)):
            time.sleep(min(1.5, seconds / 4))
            # The other worker serves alone while this one's successor starts.
            leaving = rig.supervisors.pop(0)
            before = rig.look().workers
            started_s = time.monotonic()
            leaving.process.send_signal(signal.SIGTERM)
            codes.append(leaving.process.wait(20))
            stops.append(round(time.monotonic() - started_s, 2))
            rig.start_supervisor(f"next{len(stops)}")
            rig.wait_for(lambda least=before: rig.look().workers >= least, 60)
        clients = rig.loaded(seconds)
        row = judge("worker SIGTERM with work in flight", clients, seconds)
        row |= {"stop_s": stops, "exit_codes": codes + rig.stop_workers(), **rig.turn_counts()}
        check(row, set(row["exit_codes"]) == {0}, f"exit codes {row['exit_codes']}")
        check(row, max(stops) < _GRACE_S, f"a stop took {max(stops)} s")
        # What was handed back is reclaimed as well; more than that waited for a lease.
        abandoned = row["reclaimed"] - row["released"]
        check(row, abandoned <= 0, f"{abandoned} tasks were left to their lease")
        check(row, row["released"] > 0, "nothing was handed back: no worker stopped with work")
        check(row, row["max_ms"] < _LONG_LEASE_S * 1000, "a task waited for a lease")
        return row


def worker_paused(folder: Path, seconds: float) -> dict[str, Any]:
    """SIGSTOP beyond the lease, then SIGCONT: its tasks were taken over, its answers come late."""
    with Rig(folder) as rig:
        rig.load(seconds)
        pauses = 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(0.5)
            child = rig.busy(1.0)
            if child is None:
                continue
            child.suspend()
            pauses += 1
            time.sleep(2 * _LEASE_S + 1.0)
            _resume(child)
        clients = rig.loaded(seconds)
        row = judge("worker SIGSTOP beyond its lease", clients, seconds, pauses=pauses)
        row |= rig.counters()
        row["exit_codes"] = rig.stop_workers()
        check(row, row["reclaimed"] > 0, "no task was taken over")
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def _resume(child: psutil.Process) -> None:
    try:
        child.resume()
    except psutil.NoSuchProcess:
        pass
