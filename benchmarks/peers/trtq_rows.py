"""A trtq client over a .npy file: single-row submits in a closed loop, or a bulk job."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from benchmarks.peers.loops import Loops, WrongAnswer, obey
from producer import Client
from producer.bulk import run_bulk
from producer.ticket import Ticket

_TIMEOUT_S = 30
_ROWS = 4096
_TOLERANCE = "1e-3"


def main() -> None:
    url, model = os.environ["BENCH_REDIS_URL"], os.environ["BENCH_MODEL"]
    data, expected_path = os.environ["BENCH_DATA"], os.environ["BENCH_EXPECTED"]
    tolerance = float(os.environ.get("BENCH_TOLERANCE", _TOLERANCE))
    rows = list(np.load(data, mmap_mode="r")[:_ROWS])
    expected = np.load(expected_path, mmap_mode="r")
    ends = [(row.item(0), row.item(-1)) for row in expected[: len(rows)]]
    with Client(url) as client:

        def submit(i: int) -> Ticket:
            return client.submit(model, rows[i])

        def finish(i: int, ticket: Ticket) -> None:
            result = ticket.result(_TIMEOUT_S)
            first, last = ends[i]
            if abs(result.item(0) - first) > tolerance or abs(result.item(-1) - last) > tolerance:
                raise WrongAnswer(f"row {i} was answered with another row's result")

        def bulk(output: str, window: int) -> dict[str, Any]:
            cpu_s, start = time.process_time(), time.perf_counter()
            summary = run_bulk(client, model, data, output, window=window, overwrite=True)
            took_s = time.perf_counter() - start
            cpu_s = time.process_time() - cpu_s
            if summary.failed or not np.allclose(np.load(output), expected, atol=tolerance):
                raise WrongAnswer(f"the bulk job's output differs ({summary.failed} rows failed)")
            return {
                "per_s": summary.rows_per_s,
                "whole_per_s": summary.rows / took_s,
                "rows": summary.rows,
                "tasks": summary.tasks,
                "client_cpu_us": 1e6 * cpu_s / summary.rows,
            }

        loops = Loops(submit, finish, requests=len(rows))
        obey({"saturate": loops.saturate, "serial": loops.serial, "bulk": bulk})


if __name__ == "__main__":
    main()
