"""Rows/s of the real executor: feed, gather, slots, scatter; tasks of one batch each in memory."""

from __future__ import annotations

import time

from benchmarks.gpu.subject import Subject
from producer.entries import Entry, Settlement
from producer.spec import ModelSpec
from producer.task import InferenceTask, Tensor
from workers.batcher import Held
from workers.executor import Executor
from workers.feed import Feed
from workers.files import RowFiles
from workers.incidents import Incidents
from workers.metrics import Counters
from workers.runner import BatchRunner
from workers.stages import Stages

_WARM_S = 0.3
_END_S = 30.0


def executor_rate(
    subject: Subject, batch: int, slots: int, *, graphs: bool, seconds: float
) -> float:
    """Rows/s answered in the `seconds` after a warm-up; every answer's size is checked."""
    engine = subject.engine(slots=slots, graphs=graphs, max_batch=batch)
    spec = ModelSpec(
        name="m",
        inputs=engine.spec.inputs,
        outputs=engine.spec.outputs,
        max_batch=batch,
        max_rows_per_task=batch,
    )

    def clock() -> float:
        return time.monotonic() * 1000

    feed = Feed(batch, 0.0, clock)
    done: list[tuple[float, int]] = []
    deaths: list[str] = []

    def deliver(settlements: list[Settlement], urgent: bool) -> None:
        now_s = time.perf_counter()
        done.extend((now_s, len(settlement.reply)) for settlement in settlements)

    counters = Counters()
    incidents = Incidents(spec.name, counters)
    runner = BatchRunner(engine, spec, RowFiles([]), counters, Stages(), incidents, clock)
    executor = Executor(engine, spec, feed, runner, slots, deliver, deaths.append, incidents)
    executor.start()
    shape = (batch, *subject.row)
    tensor = Tensor("x", subject.dtype, shape, subject.rows(batch, 3).tobytes())
    task, entry = InferenceTask("bench-1", batch, (tensor,)), Entry(1, b"1-1", b"", batch)
    key = ((subject.dtype, subject.row),)
    started_s, sent, ahead = time.perf_counter(), 0, slots + 1
    until_s = started_s + _WARM_S + seconds
    try:
        while time.perf_counter() < until_s:
            if feed.held_rows <= ahead * batch:
                now_ms = clock()
                feed.add([Held(entry, task, key, now_ms, now_ms + 1e9) for _ in range(ahead)])
                sent += ahead
            feed.wait_at_most(ahead * batch - 1, 20)
        feed.wait_idle(_END_S * 1000)
    finally:
        executor.close()
        engine.close()
    if len(done) != sent or deaths or any(size < batch * subject.width * 4 for _, size in done):
        raise AssertionError(f"{len(done)} of {sent} answers, {deaths}")
    times_s = [at_s for at_s, _ in done if started_s + _WARM_S <= at_s <= until_s]
    return (len(times_s) - 1) * batch / (times_s[-1] - times_s[0])
