"""The judge of `make chaos` sees what it must see, and a real disk that fills up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from benchmarks.chaos import client as chaos_client
from benchmarks.chaos.faults_bulk import bulk_disk_full
from benchmarks.chaos.judge import failed, judge
from benchmarks.chaos.model import NAME, WIDTH, checksum, poison_id, poison_kind
from producer import Client, keys
from producer.errors import EngineFailed
from producer.mailbox import Mailbox
from producer.spec import ModelSpec, TensorSpec
from producer.task import Reply, Tensor
from producer.wire import encode_reply
from tests.support.processes import until

SPEC = ModelSpec(
    name=NAME,
    inputs=(
        TensorSpec(name="x", dtype="uint8", shape=(WIDTH,)),
        TensorSpec(name="id", dtype="int64", shape=()),
    ),
    outputs=(
        TensorSpec(name="sum", dtype="int64", shape=()),
        TensorSpec(name="echo", dtype="int64", shape=()),
    ),
    max_batch=16,
    max_rows_per_task=16,
)


class Answering:
    """One client of the load, whose answers the test writes itself."""

    def __init__(self, url: str, connection: redis.Redis) -> None:
        self._connection = connection
        connection.hset(keys.MODELS, NAME, SPEC.model_dump_json())
        wire = chaos_client.Wire()
        wire.install()
        self.client = Client(url).start()
        self.load = chaos_client.Load(self.client, 1, wire)

    def submit(self, count: int, poison: str | None = None, deadline_s: float = 60.0) -> list[Any]:
        before = len(self.load._sent)
        for _ in range(count):
            self.load._submit(poison, deadline_s, None)
        return self.load._sent[before:]

    def answer(self, sent: Any, value: int | None = None) -> None:
        """Its right answer, or `value` in place of the sum."""
        numbers = {"sum": sent.expected if value is None else value, "echo": sent.number}
        outputs = [
            Tensor(name, "int64", (1,), np.array([number], np.int64).tobytes())
            for name, number in numbers.items()
        ]
        self.put(Reply(sent.ticket.task_id, outputs=tuple(outputs)))

    def put(self, reply: Reply) -> None:
        key = keys.reply(self.client.client_id)
        self._connection.rpush(key, encode_reply(reply))

    def row(self, **options: Any) -> dict[str, Any]:
        until(lambda: all(sent.ticket.done() for sent in self.load._sent))
        return judge("test", [self.load.finish()], 1.0, **options)


@pytest.fixture
def answering(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Answering]:
    monkeypatch.setattr(Mailbox, "_next", Mailbox._next)  # restored after the test
    made = Answering(redis_url, connection)
    yield made
    made.client.close()


def test_right_answers_pass(answering: Answering) -> None:
    for sent in answering.submit(5):
        answering.answer(sent)
    row = answering.row()
    assert (row["accepted"], row["answered_once"]) == (5, 5)
    assert not failed(row)


def test_a_second_reply_is_seen(answering: Answering) -> None:
    first, second = answering.submit(2)
    answering.answer(first)
    answering.answer(first)
    answering.answer(second)
    row = answering.row()
    assert (row["answered_once"], row["answered_twice"]) == (1, 1)
    assert failed(row)


def test_a_wrong_answer_and_a_swapped_one_are_seen(answering: Answering) -> None:
    sent = answering.submit(2)
    answering.answer(sent[0], value=sent[0].expected + 1)
    answering.answer(sent[1], value=sent[0].expected)
    row = answering.row()
    assert row["wrong"] == 2
    assert failed(row)


def test_errors_count_as_lost_unless_the_fault_excuses_them(answering: Answering) -> None:
    (sent,) = answering.submit(1)
    error = EngineFailed("no")
    answering.put(Reply(sent.ticket.task_id, error_code=error.code, error_message=error.message))
    assert answering.row()["lost"] == 1
    excused = answering.row(allowed=("engine_failed",))
    assert (excused["lost"], excused["named_errors"]) == (0, {"engine_failed": 1})
    assert not failed(excused)


def test_a_task_that_nobody_answers_is_lost(answering: Answering) -> None:
    answering.submit(1, deadline_s=0.1)
    row = answering.row()
    assert row["lost"] == 1
    assert row["named_errors"] == {"deadline_exceeded": 1}
    assert failed(row)


def test_poison_must_end_with_its_own_error(answering: Answering) -> None:
    answered, failing = answering.submit(2, "raise")
    assert {poison_kind(sent.number) for sent in (answered, failing)} == {"raise"}
    answering.answer(answered)
    answering.put(Reply(failing.ticket.task_id, error_code="engine_failed", error_message="x"))
    row = answering.row(poison="engine_failed")
    assert (row["answered_once"], row["wrong"], row["lost"]) == (1, 1, 0)
    assert answering.row(poison="poison_task")["lost"] == 1


def test_poison_ids_are_no_ids_of_good_tasks() -> None:
    assert poison_kind(10_000_001) is None
    assert poison_kind(poison_id("segfault", 40_000_001)) == "segfault"
    assert checksum(np.ones(WIDTH, np.uint8), 1) == WIDTH * (WIDTH + 1) // 2 + 7


def test_a_disk_that_fills_up_under_a_bulk_job(tmp_path: Path) -> None:
    probe = ["unshare", "-Urm", "true"]
    try:
        subprocess.run(probe, check=True, timeout=10, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine allows no user namespace")
    row = bulk_disk_full(tmp_path, 1.0)
    assert not failed(row), row
