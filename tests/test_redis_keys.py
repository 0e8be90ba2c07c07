"""Redis holds the keys that docs/architecture.md names, of those types and with those expiries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import redis

from benchmarks.redis_keys import documented_keys, undocumented
from producer import Client, keys
from producer.config import ProducerSettings
from producer.inbox import Inbox
from producer.link import Link
from tests.support import models as onnx_models
from tests.support.processes import start_worker, until


def test_real_traffic_leaves_documented_keys_only(redis_url: str, tmp_path: Path) -> None:
    onnx_models.checksum_model(tmp_path / "checksum.onnx", 8)
    onnx_models.write_config(tmp_path, "checksum", max_batch=4)
    raw = redis.Redis.from_url(redis_url, protocol=2)
    inbox = Inbox(Link(raw), "checksum")
    worker = start_worker(redis_url, tmp_path)
    row = np.zeros(8, np.uint8)
    try:
        with Client(redis_url, settings=ProducerSettings(store_s=60)) as client:
            until(lambda: "checksum" in [spec.name for spec in client.models()])
            for priority in keys.PRIORITIES:
                tickets = [client.submit("checksum", row, priority=priority) for _ in range(20)]
                tickets.append(client.submit("checksum", row, priority=priority, store=True))
                tickets.append(client.submit("checksum", row, deadline=0.001))
                tickets[0].cancel()
                for ticket in tickets:
                    ticket.exception(30)
            assert undocumented(raw) == []
            assert raw.exists(keys.result(tickets[-2].task_id))
    finally:
        code = worker.stop()
    assert code == 0
    assert undocumented(raw) == []
    until(lambda: inbox.look()[:6] == (0, 0, 0, 0, 0, 0))
    assert not [one for s in inbox.keys.streams for one in raw.xinfo_consumers(s, keys.GROUP)]
    raw.close()


def test_what_is_not_documented_is_found(connection: redis.Redis) -> None:
    connection.set("trtq:{m}:new", "x")
    connection.set("trtq:models", "x")
    connection.rpush("trtq:reply:c.1", "x")
    connection.hset("trtq:{m}:events", "a", "1")
    connection.set("trtq:result:c.1-0", "x", ex=60)
    assert undocumented(connection) == [
        "trtq:models is a string, documented as hash",
        "trtq:reply:c.1 (list) has no expiry",
        "trtq:{m}:new (string) is not documented",
    ]


@pytest.mark.parametrize("model", ["m", "a.b-c"])
def test_every_name_that_the_code_makes_is_documented(model: str) -> None:
    documented = documented_keys()
    made = [
        *keys.model_keys(model),
        *(keys.seen(model, priority, "c.1") for priority in keys.PRIORITIES),
        *(keys.MODELS, keys.reply("c.1"), keys.result("c.1-0"), keys.worker("cpu@host.1")),
        *(keys.bell_queue(model), keys.INFER_QUEUE),
    ]
    assert [name for name in made if documented.type_of(name) is None] == []
