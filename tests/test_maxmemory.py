"""A Redis at `maxmemory` with `noeviction`: producers are told, workers drain, service goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from producer import Client
from producer.embedded import EmbeddedRedis
from producer.entries import Settlement
from producer.errors import RedisFull
from producer.letters import encode_letter
from producer.link import Link
from producer.purge import purge
from tests.support import models as onnx_models
from tests.support.processes import start_worker, until
from tests.support.specs import SPEC
from workers.inbox import WorkerInbox

ROWS = np.random.default_rng(5).integers(0, 256, (40, 16), dtype=np.uint8)

LETTER = encode_letter("c-1", "poison_task", "killed", 1, 1, 4, ["w1"], b"1-0", 1)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as made:
        yield made


@pytest.fixture
def raw(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, protocol=2) as made:
        yield made


def fill(raw: redis.Redis) -> None:
    raw.config_set("maxmemory-policy", "noeviction")
    raw.config_set("maxmemory", 1)


def test_the_queue_works_at_maxmemory_except_for_adding(raw: redis.Redis) -> None:
    inbox = WorkerInbox(Link(raw), "m")
    _, ids = inbox.add(SPEC, 1, "c", 1, [(1, b"a"), (1, b"b"), (1, b"c"), (1, b"d")])
    before = inbox.look()
    fill(raw)
    for priority in range(3):
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            inbox.add(SPEC, priority, "c", 2, [(1, b"e")])
    assert inbox.look()[:6] == before[:6]
    assert raw.exists(inbox.keys.high, inbox.keys.low) == 0
    inbox.attend("w", 5000)
    (first,) = inbox.enter("w", 1).entries
    assert inbox.wait("w", 1, 1) == []
    (second,) = inbox.claim("w", 1).entries
    assert inbox.renew("w", [first, second]) == frozenset()
    assert inbox.release("w", [second], 10_000) == 1
    (again,) = inbox.reclaim("w", 10_000, 10, 3, False).entries
    done = [Settlement(e, 1, "c", b"r", "trtq:result:c-1", 9, LETTER) for e in (first, again)]
    assert inbox.settle(done).answered == 2
    assert ids[3] is not None
    assert inbox.cancel(1, ids[3], 1, 1) == 1
    inbox.leave("w")
    inbox.heal(1)
    assert inbox.sweep() > 0
    assert purge(raw, "m") == 1
    assert inbox.look().rows == 0


def test_producers_are_told_workers_drain_and_service_goes_on(
    server: EmbeddedRedis, raw: redis.Redis, tmp_path: Path
) -> None:
    onnx_models.checksum_model(tmp_path / "checksum.onnx", 16)
    onnx_models.write_config(tmp_path, "checksum", max_batch=4)
    start_worker(server.url, tmp_path, name="publishes").stop()
    sums = onnx_models.checksum(ROWS)
    with Client(server.url) as client:
        tickets = [client.submit("checksum", row) for row in ROWS]
        until(lambda: all(ticket.accepted() for ticket in tickets))
        fill(raw)
        at_once = client.submit("checksum", ROWS[0], timeout=0)
        assert isinstance(at_once.exception(10), RedisFull)
        # A worker that starts now has to bind its queues, publish and take bells.
        worker = start_worker(server.url, tmp_path, name="drains")
        assert [int(ticket.result(30)) for ticket in tickets] == sums.tolist()
        assert isinstance(client.submit("checksum", ROWS[0], timeout=0).exception(10), RedisFull)
        patient = client.submit("checksum", ROWS[1], timeout=30)
        assert not patient.done()
        raw.config_set("maxmemory", 0)
        assert int(patient.result(20)) == sums[1]
        assert int(client.submit("checksum", ROWS[2]).result(20)) == sums[2]
    assert worker.stop() == 0
