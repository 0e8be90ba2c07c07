"""Bulk jobs: a disk that fills up under the output, and two jobs with one output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chaos.judge import check
from benchmarks.chaos.model import WIDTH
from benchmarks.processes import ROOT
from producer.bulk import run_bulk
from producer.client import Client
from producer.embedded import EmbeddedRedis
from producer.errors import TrtqError
from tests.support import models as onnx_models
from tests.support.processes import start_worker

_DISK_BYTES = 2 << 20


def bulk_disk_full(folder: Path, seconds: float) -> dict[str, Any]:
    """A tmpfs of 2 MiB, in a mount namespace of its own, fills up while a job writes to it."""
    row = _row("disk full under a bulk job")
    disk = folder / "disk"
    disk.mkdir()
    inside = f'mount -t tmpfs -o size={_DISK_BYTES} none "$0" && exec "$@"'
    command = [sys.executable, "-m", "benchmarks.chaos.faults_bulk", str(folder)]
    command = ["unshare", "-Urm", "sh", "-c", inside, str(disk), *command]
    if shutil.which("unshare") is None:
        raise NotImplementedError("no unshare to mount a small disk with")
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        check(row, False, f"ended with {done.returncode}: {done.stderr[-1000:]}")
        return row
    found = json.loads(done.stdout.splitlines()[-1])
    row["accepted"] = row["answered_once"] = found["rows"]
    row["named_errors"] = found["codes"]
    row["wrong"] = found["wrong"]
    row["lost"] = found["unlisted"]
    check(row, found["codes"].get("output_failed", 0) > 0, "the disk did not fill up")
    check(row, found["resumed"] == found["rows"], f"{found['resumed']} rows right after a resume")
    check(row, found["worker"] == 0, f"the worker ended with {found['worker']}")
    return row


def bulk_twice(folder: Path, seconds: float) -> dict[str, Any]:
    """A second job into the output of a running one is refused, and the first is not harmed."""
    row = _row("two bulk jobs into one output")
    rows = _write_input(folder / "in.npy", 40_000)
    models = _write_models(folder)
    with EmbeddedRedis() as server, Client(server.url) as client:
        worker = start_worker(server.url, models, bulk_roots=str(folder))
        refusals: list[str] = []

        def intrude(progress: Any) -> None:
            if len(refusals) < 20:
                try:
                    run_bulk(client, "sum", folder / "in.npy", folder / "out.npy", overwrite=True)
                    refusals.append("accepted")
                except TrtqError as error:
                    refusals.append(error.code)

        summary = run_bulk(client, "sum", folder / "in.npy", folder / "out.npy", progress=intrude)
        row["exit_codes"] = [worker.stop()]
    row["accepted"] = row["answered_once"] = summary.rows - summary.failed
    row["wrong"] = _wrong(folder / "out.npy", rows)
    row["named_errors"] = {code: refusals.count(code) for code in set(refusals)}
    check(row, set(refusals) == {"job_busy"}, f"the second jobs ended with {set(refusals)}")
    check(row, row["exit_codes"] == [0], f"exit codes {row['exit_codes']}")
    return row


def _row(name: str) -> dict[str, Any]:
    counts = ("accepted", "answered_once", "answered_twice", "lost", "wrong", "hung")
    return {"fault": name, **dict.fromkeys(counts, 0), "named_errors": {}, "failures": []}


def _write_models(folder: Path) -> Path:
    models = folder / "models"
    onnx_models.checksum_model(models / "sum.onnx", WIDTH)
    onnx_models.write_config(models, "sum", max_batch=64, threads=1)
    return models


def _write_input(path: Path, count: int) -> np.ndarray[Any, Any]:
    rows = np.random.default_rng(9).integers(0, 256, (count, WIDTH), dtype=np.uint8)
    np.save(path, rows)
    return rows


def _wrong(path: Path, rows: np.ndarray[Any, Any]) -> int:
    return int((np.load(path) != onnx_models.checksum(rows)).sum())


def _fill(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        while os.write(file, bytes(4096)):
            pass
    except OSError:
        pass
    finally:
        os.close(file)


def _fill_disk(folder: Path) -> dict[str, Any]:
    """Runs where `folder`/disk is a small disk: a job too large for what is left of it."""
    disk = folder / "disk"
    rows = _write_input(folder / "in.npy", 100_000)
    ballast = disk / "ballast"
    with EmbeddedRedis() as server, Client(server.url) as client:
        worker = start_worker(server.url, _write_models(folder), bulk_roots=str(folder))

        def fill(progress: Any) -> None:
            # What the output still needs is taken by somebody else.
            if not ballast.exists() and progress.rows_done > 20_000:
                _fill(ballast)

        codes: dict[str, int] = {}
        try:
            first = run_bulk(client, "sum", folder / "in.npy", disk / "out.npy", progress=fill)
            listed = (disk / "out.npy.errors.jsonl").read_text().splitlines()
            codes["output_failed"] = sum("output_failed" in line for line in listed)
            unlisted = first.failed - len(listed)
        except TrtqError as error:
            codes[error.code] = 1
            unlisted = 0
        ballast.unlink()
        give_up_s = time.monotonic() + 60
        second = run_bulk(
            client, "sum", folder / "in.npy", disk / "out.npy", resume=True, deadline_s=30
        )
        assert time.monotonic() < give_up_s
        wrong = _wrong(disk / "out.npy", rows)
        return {
            "rows": len(rows),
            "codes": codes,
            "unlisted": unlisted,
            "resumed": second.rows - second.failed,
            "wrong": wrong,
            "worker": worker.stop(),
        }


if __name__ == "__main__":
    print(json.dumps(_fill_disk(Path(sys.argv[1]))))
