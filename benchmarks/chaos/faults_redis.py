"""Redis that is killed and comes back, with and without its data, and Redis without memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.judge import check, judge
from benchmarks.chaos.rig import Rig

_FORGETFUL_DEADLINE_S = 6.0


def redis_killed(folder: Path, seconds: float) -> dict[str, Any]:
    """SIGKILL of a Redis with `appendfsync always`, again and again: nothing may be lost."""
    with Rig(folder, appendonly=True) as rig:
        rig.load(seconds)
        kills = _kill_redis(rig, seconds)
        clients = rig.loaded(seconds)
        row = judge("Redis SIGKILL, AOF fsync always", clients, seconds, kills=kills)
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def redis_forgets(folder: Path, seconds: float) -> dict[str, Any]:
    """SIGKILL of a Redis without persistence: named errors by the deadline, then service."""
    with Rig(folder) as rig:
        rig.load(seconds, deadline_s=_FORGETFUL_DEADLINE_S)
        kills = _kill_redis(rig, seconds)
        clients = rig.loaded(seconds)
        row = judge(
            "Redis SIGKILL, no persistence",
            clients,
            seconds,
            allowed=("deadline_exceeded", "redis_unavailable"),
            kills=kills,
        )
        _check_service(rig, row)
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def redis_full(folder: Path, seconds: float) -> dict[str, Any]:
    """`maxmemory` reached for a third of the load: producers are told, workers drain."""
    with Rig(folder) as rig:
        rig.load(seconds, timeout_s=0.0)
        time.sleep(seconds / 3)
        rig.raw.config_set("maxmemory-policy", "noeviction")
        rig.raw.config_set("maxmemory", 1)
        time.sleep(seconds / 3)
        rig.raw.config_set("maxmemory", 0)
        clients = rig.loaded(seconds)
        row = judge("Redis at maxmemory", clients, seconds, allowed=("redis_full",))
        check(row, bool(row["named_errors"].get("redis_full")), "no submit met a full Redis")
        _check_service(rig, row)
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def _kill_redis(rig: Rig, seconds: float) -> int:
    kills = 0
    end_s = time.monotonic() + seconds
    while time.monotonic() + 1 < end_s:
        time.sleep(max(2.0, seconds / 5))
        rig.server.kill()
        kills += 1
        time.sleep(0.5)
        rig.server.start()
        rig.fsync_always()
    return kills


def _check_service(rig: Rig, row: dict[str, Any]) -> None:
    """Afterwards a short load must pass without a single error."""
    before = row["answered_once"]
    rig.load(1.0)
    clients = rig.loaded(1.0)
    after = sum(one["once"] for one in clients)
    accepted = sum(one["accepted"] for one in clients) - row["accepted"]
    row["after_the_fault"] = {"accepted": accepted, "answered_once": after - before}
    check(row, after - before == accepted > 0, f"service did not go on: {row['after_the_fault']}")
