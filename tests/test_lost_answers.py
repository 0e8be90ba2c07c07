"""Claims that Redis executed and whose answers never came: nothing waits, nothing is suspected."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tests.support.specs import SPEC
from workers import runtime as runtime_module
from workers.inbox import WorkerInbox
from workers.models import load_models
from workers.runtime import Runtime
from workers.settings import WorkerSettings

X = (TensorSpec(name="x", dtype="uint8", shape=(1,)),)
X_TO_Y = (TensorSpec(name="y", dtype="uint8", shape=(1,)),)
MANY = 600
LEASE_MS = 60_000


@pytest.fixture
def inbox(connection: redis.Redis) -> WorkerInbox:
    return WorkerInbox(Link(connection), "m")


def pending(connection: redis.Redis, inbox: WorkerInbox) -> list[tuple[bytes, bytes, int]]:
    found = connection.xpending_range(inbox.keys.normal, keys.GROUP, "-", "+", 10_000)
    return [(one["message_id"], one["consumer"], one["times_delivered"]) for one in found]


def test_what_the_worker_does_not_know_is_handed_back(
    connection: redis.Redis, inbox: WorkerInbox
) -> None:
    spec = SPEC.model_copy(update={"queue_max_rows": 2 * MANY, "queue_max_bytes": 2 * MANY})
    _, ids = inbox.add(spec, 1, "c", 1, [(1, b"x")] * MANY)
    known = inbox.claim("w", 2).entries
    inbox.claim("other", 1)
    inbox.claim("w", MANY)  # its answer is lost
    rung = connection.llen("trtq.m")
    assert inbox.disown("w", known, LEASE_MS) == ids[3:]
    assert connection.llen("trtq.m") == rung + 1
    expected = [b"w", b"w", b"other", *[b"released"] * (MANY - 3)]
    assert pending(connection, inbox) == [
        (entry_id, consumer, 0 if consumer == b"released" else 1)
        for entry_id, consumer in zip(ids, expected, strict=True)
    ]
    taken = inbox.reclaim("w", LEASE_MS, MANY, 1, False).entries
    assert [entry.entry_id for entry in taken] == ids[3:]
    assert inbox.disown("w", [*known, *taken], LEASE_MS) == []
    assert connection.llen("trtq.m") == rung + 1


def test_lost_reclaims_do_not_count_either(connection: redis.Redis, inbox: WorkerInbox) -> None:
    inbox.add(SPEC, 1, "c", 1, [(1, b"x")])
    inbox.claim("dead", 1)
    for _ in range(5):
        time.sleep(0.002)
        assert len(inbox.reclaim("w", 1, 9, 2, False).entries) == 1
        assert len(inbox.disown("w", [], 1)) == 1
    assert pending(connection, inbox)[0][2] == 1


class Lossy:
    """Calls the method, and raises in place of its answer the first `times`."""

    def __init__(self, method: Callable[..., Any], times: int) -> None:
        self._method = method
        self.left = times

    def __call__(self, *args: Any, **options: Any) -> Any:
        answer = self._method(*args, **options)
        if self.left > 0:
            self.left -= 1
            raise redis.exceptions.ConnectionError("the answer was lost")
        return answer


@pytest.fixture
def runtime(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Runtime]:
    """A worker's runtime whose leases outlast the test."""
    engine = FakeEngine(lambda inputs: {"y": inputs["x"]}, X, X_TO_Y)
    onnx_models.write_config(tmp_path, "m")
    monkeypatch.setattr(runtime_module, "make_engine", lambda config, **_: engine)
    settings = WorkerSettings(
        redis_url=redis_url, models=str(tmp_path), lease_ms=LEASE_MS, linger_ms=50, max_deliveries=1
    )
    made = Runtime(settings, "t", load_models([tmp_path]), lambda reason: None, lambda: False)
    made.start()
    yield made
    assert made.close()


@pytest.mark.parametrize("method", ["enter", "reclaim"])
def test_a_task_outlives_any_number_of_lost_answers(
    runtime: Runtime, connection: redis.Redis, inbox: WorkerInbox, method: str
) -> None:
    (served,) = runtime.models
    lossy = Lossy(getattr(served.inbox, method), 5)
    setattr(served.inbox, method, lossy)
    data = np.array([[7]], np.uint8).tobytes()
    frame = encode_task(InferenceTask("c-1", 1, (Tensor("x", "uint8", (1, 1), data),)))
    inbox.add(served.spec, 1, "c", 1, [(1, frame)])
    if method == "reclaim":
        (entry,) = inbox.claim("stopped", 1).entries
        inbox.release("stopped", [entry], LEASE_MS)

    def answered() -> list[bytes]:
        runtime.turn("m", "test")
        return connection.lrange(keys.reply("c"), 0, -1)

    (blob,) = until(answered)
    assert lossy.left == 0
    (reply,) = decode_replies(blob)
    assert not reply.error_code
    assert reply.outputs[0].data == b"\x07"
    assert inbox.look().rows == 0
