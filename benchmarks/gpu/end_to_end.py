"""ResNet-50 through Redis, Celery and one worker: a bulk job by reference, and single submits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.gpu.subject import Subject
from benchmarks.processes import Driver
from benchmarks.stage_times import StageTimes
from benchmarks.trtq_worker import trtq_worker
from producer.embedded import EmbeddedRedis, free_port
from workers.gpu import gpu_reader

_BATCH = 128
_DISTINCT = 2048
_IN_FLIGHT = 64


def end_to_end(
    subject: Subject, folder: Path, images: int, clients: int, seconds: float, slots: int
) -> dict[str, Any]:
    """Rows/s of both, worker CPU, mean batch, GPU utilization; every answer is compared."""
    data, expected = folder / "images.npy", folder / "expected.npy"
    tolerance = _write(subject, data, expected, images)
    model = {
        "name": "resnet50",
        "engine": "tensorrt",
        "path": str(subject.path),
        "max_batch": _BATCH,
        "slots": slots,
        "queue_max_bytes": 2 << 30,
        "build": {
            "profiles": [{"min_batch": 1, "opt_batch": b, "max_batch": b} for b in (32, _BATCH)]
        },
    }
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        url = server.url
        port = free_port()
        worker = stack.enter_context(
            trtq_worker(
                url,
                folder,
                model,
                bulk_root=folder,
                device="0",
                ready_s=180,
                metrics_port=port,
            )
        )
        stages = StageTimes(port)
        env = {
            "BENCH_REDIS_URL": url,
            "BENCH_MODEL": "resnet50",
            "BENCH_DATA": str(data),
            "BENCH_EXPECTED": str(expected),
            "BENCH_TOLERANCE": str(tolerance),
        }
        command = [sys.executable, "-m", "benchmarks.peers.trtq_rows"]
        drivers = [
            stack.enter_context(Driver(f"client-{i}", command, folder, env)) for i in range(clients)
        ]
        found: dict[str, Any] = {"images": images, "tolerance": tolerance, "clients": clients}
        found["slots"] = slots
        for name, run in (
            ("bulk", lambda: _bulk(drivers[0], folder / "output.npy")),
            ("bulk_again", lambda: _bulk(drivers[0], folder / "output.npy")),
            ("submit", lambda: _submit(drivers, seconds)),
        ):
            before, cpu_s = worker.totals(), worker.service.cpu_s()
            redis_s, started_s = _cpu_s(server), time.perf_counter()
            stages.start()
            with _utilization() as samples:
                answer = run()
            cpu_s = worker.service.cpu_s() - cpu_s
            took_s = time.perf_counter() - started_s
            answer["redis_busy_ratio"] = (_cpu_s(server) - redis_s) / took_s
            after = worker.totals(before.rows + answer["rows"])
            answer["worker_cpu_us_per_row"] = 1e6 * cpu_s / answer["rows"]
            answer["mean_batch"] = (after.rows - before.rows) / (after.batches - before.batches)
            answer["stage_ms"] = stages.mean_ms()
            answer["gpu_percent"] = float(np.mean(samples)) if samples else None
            found[name] = answer
        return found


def _cpu_s(server: EmbeddedRedis) -> float:
    times = psutil.Process(server.pid).cpu_times()
    return times.user + times.system


def _write(subject: Subject, data: Path, expected: Path, images: int) -> float:
    """Distinct images repeated to `images` rows; returns what an answer may differ by."""
    random = np.random.default_rng(7)
    rows = subject.rows(_DISTINCT, 7)
    # Noise alone looks the same to the network: brightness tells the images apart.
    light = random.uniform(0.05, 1.0, (_DISTINCT, 1, 1, 3)).astype(np.float32)
    rows = (rows * light).astype(np.uint8)
    wanted = np.concatenate([subject.expected(part) for part in np.array_split(rows, 16)])
    copies = -(-images // _DISTINCT)
    target = np.lib.format.open_memmap(data, "w+", np.uint8, (images, *subject.row))
    for number in range(copies):
        part = target[number * _DISTINCT : (number + 1) * _DISTINCT]
        part[...] = rows[: len(part)]
    target.flush()
    np.save(expected, np.concatenate([wanted] * copies)[:images])
    return float(np.abs(wanted).max()) * 0.01


def _bulk(driver: Driver, output: Path) -> dict[str, Any]:
    done: dict[str, Any] = driver.ask("bulk", output=str(output), window=32)
    return done


def _submit(drivers: list[Driver], seconds: float) -> dict[str, Any]:
    for driver in drivers:
        driver.order("saturate", seconds=seconds, warm_s=1.0, in_flight=_IN_FLIGHT)
    answers = [driver.answer() for driver in drivers]
    drivers[0].order("serial", seconds=2.0)
    alone = drivers[0].answer()
    return {
        "per_s": sum(a["per_s"] for a in answers),
        "rows": sum(a["tasks"] for a in answers),
        "client_cpu_us": float(np.mean([a["client_cpu_us"] for a in answers])),
        "p50_ms": float(np.median([a["p50_ms"] for a in answers])),
        "p99_ms": max(a["p99_ms"] for a in answers),
        "serial_p50_ms": float(np.percentile(alone["samples_ms"], 50)),
        "serial_p99_ms": float(np.percentile(alone["samples_ms"], 99)),
    }


@contextmanager
def _utilization() -> Iterator[list[float]]:
    """GPU utilization in percent, as NVML tells it, ten times a second while the block runs."""
    samples: list[float] = []
    reader, stop = gpu_reader("0"), threading.Event()

    def sample() -> None:
        while reader is not None and not stop.wait(0.1):
            state = reader.read()
            if state is not None and state.utilization_ratio is not None:
                samples.append(100 * state.utilization_ratio)

    thread = threading.Thread(target=sample, name="bench-nvml", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join(5)
        if reader is not None:
            reader.close()
