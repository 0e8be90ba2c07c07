"""`python -m benchmarks.chaos --json FILE`: every fault in turn, one table at the end.

Loopback only; its own Redis servers and processes. Ends with 1 if a promise was broken.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.chaos import faults_bulk as bulk
from benchmarks.chaos import faults_clients as clients
from benchmarks.chaos import faults_clock as clock
from benchmarks.chaos import faults_engine as engine
from benchmarks.chaos import faults_network as network
from benchmarks.chaos import faults_redis as redis
from benchmarks.chaos import faults_workers as workers
from benchmarks.chaos.judge import failed
from benchmarks.chaos.report import broken, print_rows, skipped
from benchmarks.report import machine

Fault = Callable[[Path, float], dict[str, Any]]

FAULTS: dict[str, Fault] = {
    "worker-killed": workers.worker_killed,
    "worker-stopped": workers.worker_stopped,
    "worker-paused": workers.worker_paused,
    "redis-killed": redis.redis_killed,
    "redis-forgets": redis.redis_forgets,
    "redis-full": redis.redis_full,
    "link-reset": network.link_reset,
    "link-loses-answers": network.link_loses_answers,
    "link-stalled": network.link_stalled,
    "link-slow": network.link_slow,
    "link-half-open": network.link_half_open,
    "link-partly-half-open": network.link_partly_half_open,
    "client-killed": clients.client_killed,
    "engine-raises": engine.engine_raises,
    "engine-wrong-shape": engine.engine_wrong_shape,
    "engine-segfaults": engine.engine_segfaults,
    "engine-hangs": engine.engine_hangs,
    "clock-stepped": clock.clock_stepped,
    "redis-clock-stepped": clock.redis_clock_stepped,
    "bulk-disk-full": bulk.bulk_disk_full,
    "bulk-twice": bulk.bulk_twice,
}
_DEADLINE_S = 590.0


class OutOfTime(BaseException):
    """The whole run's deadline has passed."""


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    seconds: Annotated[float, typer.Option(help="Load under each fault.")] = 20.0,
    only: Annotated[list[str] | None, typer.Option(help="Only these faults.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep all logs in this folder.")] = None,
    deadline_s: Annotated[float, typer.Option(help="The run ends after this long.")] = _DEADLINE_S,
) -> None:
    """Injects faults under load and counts what became of every task."""
    unknown = set(only or ()) - set(FAULTS)
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: there are {', '.join(FAULTS)}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows: list[dict[str, Any]] = []

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    started_s = time.monotonic()
    chosen = [name for name in FAULTS if not only or name in only]
    with tempfile.TemporaryDirectory(prefix="trtq-chaos-") as temporary:
        for name in chosen:
            console.print(f"{time.monotonic() - started_s:5.0f} s  {name}")
            folder = (keep or Path(temporary)) / name
            folder.mkdir(parents=True, exist_ok=True)
            rows.append(_run(FAULTS[name], name, folder, seconds))
            if rows[-1].get("out_of_time"):
                break
        rows += [skipped(name) for name in chosen[len(rows) :]]
    signal.setitimer(signal.ITIMER_REAL, 0)
    if json_path is not None:
        document = [{**row, "machine": machine()} if not at else row for at, row in enumerate(rows)]
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    print_rows(console, rows, time.monotonic() - started_s)
    raise typer.Exit(1 if any(failed(row) for row in rows) else 0)


def _run(fault: Fault, name: str, folder: Path, seconds: float) -> dict[str, Any]:
    started_s = time.monotonic()
    try:
        row = fault(folder, seconds)
    except OutOfTime:
        row = {**broken(name, "the run's deadline passed"), "out_of_time": True}
    except Exception as failure:  # noqa: BLE001 - one broken fault must not hide the others
        traceback.print_exc()
        row = broken(name, f"{type(failure).__name__}: {failure}"[:2000])
    return {"name": name, **row, "took_s": round(time.monotonic() - started_s, 1)}


if __name__ == "__main__":
    typer.run(main)
