"""The whole system with several worker processes: one per GPU, or several on one, with MPS too."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.end_to_end import submits
from benchmarks.gpu.job import Job
from benchmarks.processes import BenchmarkError, Service
from benchmarks.report import Target
from benchmarks.trtq_worker import trtq_worker
from producer.embedded import EmbeddedRedis

_CONTROL = "nvidia-cuda-mps-control"
_READY_S = 240.0
_QUIT_S = 30.0


def run(
    job: Job,
    slots: int,
    *,
    devices: str,
    copies: int = 1,
    clients: int = 0,
    seconds: float = 0.0,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A bulk job, the better of two, and with `clients` single submits for `seconds`.

    `copies` workers share each of the `devices`.
    """
    workers = copies * len(devices.split(","))
    with (
        EmbeddedRedis() as server,
        trtq_worker(
            server.url,
            job.folder,
            job.model(slots),
            bulk_root=job.folder,
            devices=devices,
            copies=copies,
            ready_s=_READY_S,
            env=env,
        ),
        job.drivers(server.url, max(1, clients)) as drivers,
    ):
        found: dict[str, Any] = {"devices": devices, "copies": copies, "slots": slots}
        found["bulk_per_s"] = max(job.bulk(drivers[0], workers)["per_s"] for _ in range(2))
        if clients:
            found["submit"] = submits(drivers, seconds)
        return found


def on_one_gpu(
    job: Job, slots: int, copies: Sequence[int], clients: int, seconds: float, console: Console
) -> list[dict[str, Any]]:
    """`run` for each number of workers on the first GPU, without MPS, then with it if it is there.

    The slots are divided among the workers.
    """
    found = []
    for mps_on in (False, True):
        if mps_on and shutil.which(_CONTROL) is None:
            console.print(f"no {_CONTROL} here: MPS is not measured")
            break
        daemon: AbstractContextManager[dict[str, str]] = (
            mps(job.folder) if mps_on else nullcontext({})
        )
        with daemon as env:
            for number in copies:
                each = max(2, slots // number)
                one = run(
                    job, each, devices="0", copies=number, clients=clients, seconds=seconds, env=env
                )
                found.append({"mps": mps_on, **one})
                console.print(found[-1])
    return found


def on_all_gpus(job: Job, slots: int, gpus: int) -> list[dict[str, Any]]:
    """`run` on the first GPU alone, then on all."""
    devices = [str(number) for number in range(gpus)]
    return [run(job, slots, devices=names) for names in ("0", ",".join(devices))]


def target(found: list[dict[str, Any]], gpus: int) -> Target:
    """How much faster all `gpus` are than one; `found` is empty where there is only one."""
    ratio = found[1]["bulk_per_s"] / found[0]["bulk_per_s"] if found else None
    return Target(f"{gpus}_gpus_over_1", ratio, least=0.95 * gpus)


def table(found: list[dict[str, Any]]) -> Table:
    """A line for each run on one GPU."""
    made = Table(
        "workers", "slots each", "MPS", "bulk rows/s", "submits/s", "p50 ms", "p99 ms",
        title="several workers on one GPU",
    )  # fmt: skip
    for run_found in found:
        submit = run_found["submit"]
        made.add_row(
            str(run_found["copies"]),
            str(run_found["slots"]),
            "yes" if run_found["mps"] else "no",
            f"{run_found['bulk_per_s']:,.0f}",
            f"{submit['per_s']:,.0f}",
            f"{submit['p50_ms']:.0f}",
            f"{submit['p99_ms']:.0f}",
        )
    return made


@contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    """An MPS daemon of its own; yields what its clients need in their environment."""
    pipes, logs = folder / "mps-pipes", folder / "mps-logs"
    pipes.mkdir(exist_ok=True)
    logs.mkdir(exist_ok=True)
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    with Service("mps-control", [_CONTROL, "-f"], folder, env) as daemon:
        daemon.wait_until((pipes / "control").exists, 20)
        try:
            yield env
            if "NEW CLIENT" not in _server_log(logs).upper():
                raise BenchmarkError(f"no process used MPS: {_server_log(logs)[-500:]!r}")
        finally:
            subprocess.run(
                [_CONTROL], input=b"quit\n", env={**os.environ, **env}, timeout=_QUIT_S, check=False
            )
            give_up_s = time.monotonic() + _QUIT_S
            while daemon.process.poll() is None and time.monotonic() < give_up_s:
                time.sleep(0.05)


def _server_log(logs: Path) -> str:
    texts = (path.read_text(errors="replace") for path in sorted(logs.glob("*.log")))
    return "\n".join(texts)
