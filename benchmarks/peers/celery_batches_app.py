"""celery-batches: one message per request, run in batches. Worker app, and client as script.

Runs in a virtualenv of its own: celery-batches needs a Celery older than 5.7.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery_batches import Batches  # type: ignore[import-not-found]

from benchmarks.peers.loops import PAYLOADS, Loops, WrongAnswer, obey

_TIMEOUT_S = 30
_BATCH = 64

app = Celery("batches", broker=os.environ["BENCH_REDIS_URL"], backend=os.environ["BENCH_REDIS_URL"])
app.conf.update(
    accept_content=["msgpack"],
    broker_connection_retry_on_startup=True,
    result_accept_content=["msgpack"],
    result_expires=60,
    result_serializer="msgpack",
    task_serializer="msgpack",
    # Must exceed the batch, or batches only ever end by their timer.
    worker_prefetch_multiplier=4 * _BATCH,
    worker_send_task_events=False,
)


@app.task(  # type: ignore[untyped-decorator]
    name="bench.batch", base=Batches, flush_every=_BATCH, flush_interval=0.01
)
def batch(requests: list[Any]) -> None:
    for request in requests:
        app.backend.mark_as_done(request.id, request.args[0], request=request)


def main() -> None:
    queue = os.environ["BENCH_QUEUE"]

    def submit(i: int) -> Any:
        return batch.apply_async((PAYLOADS[i],), queue=queue)

    def finish(i: int, result: Any) -> None:
        if result.get(timeout=_TIMEOUT_S) != PAYLOADS[i]:
            raise WrongAnswer(f"celery-batches answered request {i} with another result")

    loops = Loops(submit, finish)
    obey({"saturate": loops.saturate, "serial": loops.serial})


if __name__ == "__main__":
    main()
