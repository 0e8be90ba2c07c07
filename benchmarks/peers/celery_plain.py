"""Plain Celery: one task per request that returns its payload. Worker app, and client as script."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from benchmarks.peers.loops import PAYLOADS, Loops, WrongAnswer, obey

_TIMEOUT_S = 30

app = Celery("plain", broker=os.environ["BENCH_REDIS_URL"], backend=os.environ["BENCH_REDIS_URL"])
app.conf.update(
    accept_content=["msgpack"],
    broker_connection_retry_on_startup=True,
    result_accept_content=["msgpack"],
    result_expires=60,
    result_serializer="msgpack",
    task_serializer="msgpack",
    # Deep enough that no pool waits for the broker between two tasks.
    worker_prefetch_multiplier=64,
    worker_send_task_events=False,
)


@app.task(name="bench.echo")  # type: ignore[untyped-decorator]
def echo(payload: bytes) -> bytes:
    return payload


def main() -> None:
    queue = os.environ["BENCH_QUEUE"]

    def submit(i: int) -> Any:
        return echo.apply_async((PAYLOADS[i],), queue=queue)

    def finish(i: int, result: Any) -> None:
        if result.get(timeout=_TIMEOUT_S) != PAYLOADS[i]:
            raise WrongAnswer(f"Celery answered request {i} with another result")

    loops = Loops(submit, finish)

    def idle(seconds: float, pause_s: float) -> dict[str, Any]:
        return loops.serial(seconds, warm=1, pause=lambda: time.sleep(pause_s))

    obey({"saturate": loops.saturate, "serial": loops.serial, "idle": idle})


if __name__ == "__main__":
    main()
