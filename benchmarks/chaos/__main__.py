"""`python -m benchmarks.chaos --json FILE`: every fault, two at a time, one table at the end.

Loopback only; its own Redis servers and processes. Ends with 1 if a promise was broken.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.judge import failed
from benchmarks.chaos.report import broken, print_rows
from benchmarks.processes import ROOT
from benchmarks.report import machine

_DEADLINE_S = 540.0
_STOP_S = 25.0
_LEAST_LOAD_S = 4.0
#: What starting and stopping a fault's processes takes, until it is known.
_FIRST_GUESS_S = 12.0


class Running:
    """A fault that runs now."""

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._out = folder / "fault.log", folder / "row.json"
        command = [sys.executable, "-m", "benchmarks.chaos.one", name, str(folder), str(seconds)]
        with self._log.open("wb") as log, self._out.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )

    def stop(self) -> None:
        """Ends it and what it started."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_STOP_S)

    def row(self) -> dict[str, Any]:
        """Its row, once it has ended."""
        lines = self._out.read_text(errors="replace").splitlines()
        if self.process.returncode or not lines:
            log = self._log.read_text(errors="replace")[-1000:]
            reason = f"ended with {self.process.returncode}: {log}"
            return {"name": self.name, **broken(self.name, reason)}
        row: dict[str, Any] = json.loads(lines[-1])
        return {**row, "load_s": round(self.seconds, 1)}


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    seconds: Annotated[
        float, typer.Option(help="Load under each fault; less where time runs short.")
    ] = 20.0,
    only: Annotated[list[str] | None, typer.Option(help="Only these faults.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Faults at the same time.")] = 2,
    keep: Annotated[Path | None, typer.Option(help="Keep all logs in this folder.")] = None,
    deadline_s: Annotated[float, typer.Option(help="The run ends after this long.")] = _DEADLINE_S,
) -> None:
    """Injects faults under load and counts what became of every task."""
    unknown = set(only or ()) - set(FAULTS)
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: there are {', '.join(FAULTS)}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    chosen = [name for name in FAULTS if not only or name in only]
    started_s = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    where = machine()
    with tempfile.TemporaryDirectory(prefix="trtq-chaos-") as temporary:
        found = _run(chosen, keep or Path(temporary), seconds, parallel, deadline_s, console)
    took_s = time.monotonic() - started_s
    rows = [found[name] for name in chosen]
    if json_path is not None:
        first = {"machine": where, "seconds": seconds, "parallel": parallel, "took_s": took_s}
        document = [{**row, "run": first} if not at else row for at, row in enumerate(rows)]
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    print_rows(console, rows, took_s)
    raise typer.Exit(1 if any(failed(row) for row in rows) else 0)


def _run(
    names: list[str],
    folder: Path,
    seconds: float,
    parallel: int,
    deadline_s: float,
    console: Console,
) -> dict[str, dict[str, Any]]:
    started_s = time.monotonic()
    rows: dict[str, dict[str, Any]] = {}
    waiting, running = list(names), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                left_s = deadline_s - (time.monotonic() - started_s)
                load_s = _load_s(seconds, left_s, len(waiting) / parallel, list(rows.values()))
                running.append(Running(waiting[0], folder / waiting.pop(0), load_s))
            time.sleep(0.1)
            late = time.monotonic() - started_s > deadline_s
            for one in list(running):
                if late:
                    one.stop()
                if one.process.poll() is not None:
                    running.remove(one)
                    row = rows[one.name] = one.row()
                    verdict = "[red]failed" if failed(row) else "[green]ok"
                    console.print(f"{time.monotonic() - started_s:5.0f} s  {one.name} {verdict}")
            if late:
                for name in waiting:
                    rows[name] = {"name": name, **broken(name, "not run: no time was left")}
                waiting.clear()
    finally:
        for one in running:
            one.stop()
    return rows


def _load_s(wanted_s: float, left_s: float, rounds: float, rows: Sequence[dict[str, Any]]) -> float:
    """Seconds of load with which the rest of the faults should end in time."""
    others_s = [row["took_s"] - row["load_s"] for row in rows if "load_s" in row]
    other_s = sum(others_s) / len(others_s) if others_s else _FIRST_GUESS_S
    # One fault more than there are: the last ones have no neighbour to share the time with.
    return min(wanted_s, max(_LEAST_LOAD_S, left_s / (rounds + 0.5) - other_s))


if __name__ == "__main__":
    typer.run(main)
