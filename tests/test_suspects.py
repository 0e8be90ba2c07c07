"""Tasks that may have killed a worker: run alone, soon, also while new work keeps coming."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from producer import keys
from producer.link import Link
from producer.spec import TensorSpec
from producer.task import InferenceTask, Tensor
from producer.wire import decode_replies, encode_task
from tests.support import models as onnx_models
from tests.support.fake_engine import FakeEngine
from tests.support.processes import until
from workers import runtime as runtime_module
from workers.engines.base import Array
from workers.inbox import WorkerInbox
from workers.models import load_models
from workers.runtime import Runtime
from workers.settings import WorkerSettings

X = (TensorSpec(name="x", dtype="uint8", shape=(1,)),)
Y = (TensorSpec(name="y", dtype="uint8", shape=(1,)),)
WORK, SUSPECT = 1, 7
DELIVERIES = 3


class Bench:
    """A runtime in this process, its queue, and what its engine ran."""

    def __init__(self, url: str, connection: redis.Redis) -> None:
        self.url = url
        self.connection = connection
        self.inbox = WorkerInbox(Link(connection), "fake")
        self.ran: list[list[int]] = []
        self.together: list[int] = []
        self.busy = 0
        self.lock = threading.Lock()
        self.numbers = iter(range(1, 10_000))
        self.on_run: Callable[[list[int]], None] = lambda values: None

    def function(self, inputs: dict[str, Array]) -> dict[str, Array]:
        values = inputs["x"].ravel().tolist()
        if any(values):  # warm-up runs zeros
            with self.lock:
                self.busy += 1
                self.together.append(self.busy)
                self.ran.append(values)
            self.on_run(values)
            with self.lock:
                self.busy -= 1
        return {"y": inputs["x"]}

    def add(self, *values: int) -> None:
        for value in values:
            number = next(self.numbers)
            data = np.array([[value]], np.uint8).tobytes()
            task = InferenceTask(f"c-{number}", 1, (Tensor("x", "uint8", (1, 1), data),))
            spec = self.runtime.models[0].spec
            self.inbox.add(spec, 1, f"c{number}", 1, [(1, encode_task(task))])

    def add_suspects(self, count: int) -> None:
        """Entries that were with `DELIVERIES` workers which all died."""
        self.add(*[SUSPECT] * count)
        for entry in self.inbox.claim("dead", count).entries:
            self.connection.xclaim(
                self.inbox.keys.normal,
                keys.GROUP,
                "dead",
                0,
                [entry.entry_id],
                idle=60_000,
                retrycount=DELIVERIES,
                justid=True,
            )

    def start(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **config: object) -> None:
        engine = FakeEngine(self.function, X, Y)
        onnx_models.write_config(folder, "fake", **config)
        monkeypatch.setattr(runtime_module, "make_engine", lambda config, **_: engine)
        settings = WorkerSettings(
            redis_url=self.url,
            models=str(folder),
            lease_ms=30_000,
            linger_ms=60_000,
            wait_ms=100,
            turn_budget_s=3600,
            max_deliveries=DELIVERIES,
        )
        self.now_ms = time.monotonic() * 1000
        self.runtime = Runtime(
            settings,
            "t",
            load_models([folder]),
            lambda reason: None,
            lambda: False,
            clock=lambda: self.now_ms,
        )
        self.runtime.start()
        self.turn = threading.Thread(target=self.runtime.turn, args=("fake", "test"))

    def answers(self) -> list[str]:
        return [
            reply.task_id
            for blob in self.connection.lrange(keys.reply("c"), 0, -1)
            for reply in decode_replies(blob)
            if not reply.error_code
        ]


@pytest.fixture
def bench(redis_url: str, connection: redis.Redis) -> Iterator[Bench]:
    made = Bench(redis_url, connection)
    yield made
    made.runtime.request_stop()
    made.turn.join(20)
    assert made.runtime.close()


def test_a_suspect_runs_alone_within_few_batches_while_new_work_keeps_coming(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.start(monkeypatch, tmp_path, max_batch=4, slots=2, max_delay_ms=0)
    bench.add_suspects(1)
    bench.add(*[WORK] * 24)

    def more_work_than_was_taken(values: list[int]) -> None:
        with bench.lock:
            bench.now_ms += 100
        if len(bench.ran) < 60:
            bench.add(*[WORK] * (len(values) + 1))
            # A busy worker claims the next batch before this one ends; not while it runs dry.
            feed, give_up_s = bench.runtime.models[0].feed, time.monotonic() + 0.1
            while feed.held_rows < 4 and time.monotonic() < give_up_s:
                time.sleep(0.001)

    bench.on_run = more_work_than_was_taken
    bench.turn.start()
    until(lambda: len(bench.ran) >= 60, 30)
    at = bench.ran.index([SUSPECT])
    assert bench.together[at] == 1
    # A look for suspects each second, and what is held then: two batches in work, two that wait.
    assert at <= 10 + 8
    until(lambda: len(bench.answers()) == sum(map(len, bench.ran)) and not bench.inbox.look().rows)


def test_suspects_run_one_after_the_other_while_there_is_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench.start(monkeypatch, tmp_path, max_batch=8, slots=2)
    bench.add_suspects(12)
    bench.add(WORK)

    def take_longer_than_a_turn_spares(values: list[int]) -> None:
        bench.now_ms += 150

    bench.on_run = take_longer_than_a_turn_spares
    bench.turn.start()
    # The clock stands still between runs: nothing here waits for a second to pass.
    until(lambda: len(bench.answers()) == 13)
    assert sorted(bench.ran) == [[WORK]] + [[SUSPECT]] * 12
    assert max(bench.together) == 1
