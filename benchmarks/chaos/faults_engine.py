"""One poison task among good ones: it raises, returns nonsense, hangs, or kills its worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.chaos.judge import check, judge
from benchmarks.chaos.model import POISONS
from benchmarks.chaos.rig import Rig
from workers.models import ModelConfig

_HANG_S = 1.0


def engine_raises(folder: Path, seconds: float) -> dict[str, Any]:
    """Every 80th task raises in the engine."""
    return _poison(folder, seconds, "raise", "engine raises on a task")


def engine_wrong_shape(folder: Path, seconds: float) -> dict[str, Any]:
    """Every 80th task makes the engine return arrays of a wrong shape."""
    return _poison(folder, seconds, "shape", "engine returns a wrong shape")


def engine_segfaults(folder: Path, seconds: float) -> dict[str, Any]:
    """One task kills every worker that runs it, and must end as poison."""
    return _poison(folder, seconds, "segfault", "engine segfaults on a task", most=1)


def engine_hangs(folder: Path, seconds: float) -> dict[str, Any]:
    """One task never returns from the engine: the watchdog ends the worker."""
    if "batch_timeout_s" not in ModelConfig.model_fields:
        raise NotImplementedError("this release has no batch_timeout_s")
    return _poison(
        folder, seconds, "hang", "engine hangs on a task", most=1, batch_timeout_s=_HANG_S
    )


def engine_slow(folder: Path, seconds: float) -> dict[str, Any]:
    """Every batch takes twice the lease: leases are renewed and nothing is run twice."""
    env = {"CHAOS_RUN_MS": "3000"}
    with Rig(folder, env=env, model={"max_batch": 512}) as rig:
        rig.load(seconds)
        clients = rig.loaded(seconds)
        row = judge("batches longer than the lease", clients, seconds, **rig.counters())
        check(row, row["reclaimed"] == 0, f"{row['reclaimed']} tasks were taken over")
        check(row, row["dropped"] == 0, f"{row['dropped']} tasks were run twice")
        check(row, row["max_ms"] > 3000, "batches were not slow")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row


def _poison(
    folder: Path, seconds: float, kind: str, name: str, most: int = 1000, **keys: Any
) -> dict[str, Any]:
    with Rig(folder, env={"TRTQ_MAX_DELIVERIES": "1"}, model=keys) as rig:
        # One client alone sends poison: the others are the neighbours that must not notice.
        rig.load(seconds, first={"poison": kind, "poison_every": 20, "poison_most": most})
        clients = rig.loaded(seconds)
        row = judge(name, clients, seconds, poison=POISONS[kind])
        poisons = sum(sum(one["poisons"].values()) for one in clients)
        check(row, poisons > 0, "no poison was sent")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row
