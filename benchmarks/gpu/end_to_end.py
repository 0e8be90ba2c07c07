"""ResNet-50 through Redis, Celery and one worker: a bulk job by reference, and single submits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psutil

from benchmarks.gpu.job import Job
from benchmarks.processes import Driver
from benchmarks.stage_times import StageTimes
from benchmarks.trtq_worker import trtq_worker
from producer.embedded import EmbeddedRedis, free_port
from workers.gpu import gpu_reader

_IN_FLIGHT = 64


def end_to_end(job: Job, clients: int, seconds: float, slots: int) -> dict[str, Any]:
    """Rows/s of both, worker CPU, mean batch, GPU utilization; every answer is compared."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        port = free_port()
        worker = stack.enter_context(
            trtq_worker(
                server.url,
                job.folder,
                job.model(slots),
                bulk_root=job.folder,
                devices="0",
                ready_s=180,
                metrics_port=port,
            )
        )
        stages = StageTimes(port)
        drivers = stack.enter_context(job.drivers(server.url, clients))
        found: dict[str, Any] = {
            "images": job.images,
            "tolerance": job.tolerance,
            "clients": clients,
            "slots": slots,
        }
        for name, run in (
            ("bulk", lambda: job.bulk(drivers[0])),
            ("bulk_again", lambda: job.bulk(drivers[0])),
            ("submit", lambda: submits(drivers, seconds)),
        ):
            before, cpu_s = worker.totals(), worker.cpu_s()
            redis_s, started_s = _cpu_s(server), time.perf_counter()
            stages.start()
            with _utilization() as samples:
                answer = run()
            cpu_s = worker.cpu_s() - cpu_s
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


def submits(drivers: list[Driver], seconds: float) -> dict[str, Any]:
    """Single rows from all clients at once, then one at a time from one of them."""
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
