"""Runs every target for its share of the time and prints what was found; exit 1 for a crash."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tests.fuzz.judge import Score
from tests.fuzz.targets import targets

#: What a child may need beyond its share: imports, and the inputs made to be expensive.
_GRACE_S = 120.0


class _Child(NamedTuple):
    target: str
    process: subprocess.Popen[bytes]
    report: Path
    log: Path
    give_up_s: float


def main() -> int:
    """Returns the exit code."""
    names = list(targets())
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of mutated inputs, for all targets together"
    )
    parser.add_argument("--target", action="append", choices=names, help="may be repeated")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("auto", "atheris", "mutations"), default="auto")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    guided = find_spec("atheris") is not None
    engine = ("atheris" if guided else "mutations") if given.engine == "auto" else given.engine
    wanted = given.target or names
    started_s = time.monotonic()
    share_s = given.seconds * min(given.jobs, len(wanted)) / len(wanted)
    with tempfile.TemporaryDirectory() as folder:
        scores = _run_all(wanted, engine, share_s, given.seed, given.jobs, Path(folder))
    seconds = round(time.monotonic() - started_s, 1)
    Console().print(_table(scores, f"{engine}, {seconds:g} s, {share_s:.1f} s a target"))
    for name, score in scores.items():
        for crash, data in score.crashes.items():
            print(f"CRASH {name}: {crash}\n  input, in hex: {data[:200]}")
    if given.json is not None:
        facts = {
            "engine": engine,
            "seconds": seconds,
            "seconds_per_target": round(share_s, 1),
            "seed": given.seed,
            "python": platform.python_version(),
        }
        given.json.write_text(json.dumps({**facts, **_totals(scores), **_each(scores)}, indent=2))
    return 1 if any(score.crashes for score in scores.values()) else 0


def _run_all(
    names: list[str], engine: str, share_s: float, seed: int, jobs: int, folder: Path
) -> dict[str, Score]:
    waiting, running = list(enumerate(names)), list[_Child]()
    found: dict[str, Score] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, name = waiting.pop(0)
            running.append(_start(name, engine, share_s, seed, folder / str(number)))
        time.sleep(0.1)
        for child in list(running):
            if child.process.poll() is None and time.monotonic() > child.give_up_s:
                child.process.kill()
                child.process.wait()
            if child.process.poll() is not None:
                running.remove(child)
                found[child.target] = _score(child)
    return {name: found[name] for name in names}


def _start(name: str, engine: str, share_s: float, seed: int, base: Path) -> _Child:
    report, log = base.with_suffix(".json"), base.with_suffix(".log")
    command = [sys.executable, "-m", "tests.fuzz.child", "--target", name, "--engine", engine]
    command += ["--seconds", str(share_s), "--seed", str(seed), "--report", str(report)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    return _Child(name, process, report, log, time.monotonic() + share_s + _GRACE_S)


def _score(child: _Child) -> Score:
    noted: dict[str, Any] = json.loads(child.report.read_text()) if child.report.exists() else {}
    score = Score(**noted)
    code = child.process.returncode
    if code != 0:
        said = child.log.read_text(errors="replace").strip()[-500:]
        kept = [file.read_bytes() for file in child.report.parent.glob(f"{child.report.name}.*-*")]
        score.crashes[f"the process ended with {code}: {said}"] = kept[0].hex() if kept else ""
    return score


def _totals(scores: dict[str, Score]) -> dict[str, Any]:
    return {
        "inputs": sum(score.inputs for score in scores.values()),
        "crashes": sum(len(score.crashes) for score in scores.values()),
        "peak_of_bound": max(score.peak_of_bound for score in scores.values()),
    }


def _each(scores: dict[str, Score]) -> dict[str, Any]:
    return {"targets": {name: vars(score) for name, score in scores.items()}}


def _table(scores: dict[str, Score], title: str) -> Table:
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("target")
    for column in ("inputs", "refused", "crashes", "peak MiB", "of its bound", "longest ms"):
        table.add_column(column, justify="right")
    for name, score in scores.items():
        table.add_row(
            name,
            f"{score.inputs:,}",
            f"{score.refused:,}",
            str(len(score.crashes)),
            f"{score.peak_bytes / 2**20:.1f}",
            f"{score.peak_of_bound:.0%}",
            f"{score.longest_ms:,.0f}",
        )
    totals = _totals(scores)
    table.add_row("all", f"{totals['inputs']:,}", "", str(totals["crashes"]), "", "", "")
    return table


if __name__ == "__main__":
    sys.exit(main())
