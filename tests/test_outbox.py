"""The client's sender: a model whose queue is full keeps no other model's tasks back."""

from __future__ import annotations

import numpy as np
import pytest
import redis

from producer import Client, keys
from producer.config import ProducerSettings
from producer.errors import QueueFull, RateLimited
from producer.limits import RateLimit
from producer.link import Link
from producer.refusals import Holds
from producer.spec import ModelSpec, TensorSpec
from tests.support.processes import until
from workers.inbox import WorkerInbox

X = (TensorSpec(name="x", dtype="uint8", shape=(4,)),)
ROW = np.zeros(4, np.uint8)
ROOM = 8
UNSENT = 128


def publish(connection: redis.Redis, name: str, **limits: int) -> None:
    spec = ModelSpec(name=name, inputs=X, outputs=X, max_batch=8, max_rows_per_task=1, **limits)
    connection.hset(keys.MODELS, name, spec.model_dump_json())


def test_a_full_queue_keeps_no_other_model_back(redis_url: str, connection: redis.Redis) -> None:
    publish(connection, "full", queue_max_rows=ROOM)
    publish(connection, "free")
    settings = ProducerSettings(client_max_unsent=UNSENT)
    with Client(redis_url, settings=settings) as client:
        # Nobody serves it: what has no room waits in the client, up to the model's limit.
        waiting = [client.submit("full", ROW, timeout=2.0) for _ in range(ROOM + UNSENT)]
        until(lambda: client.may_wait("full"))
        with pytest.raises(QueueFull, match="128 tasks of this client for model 'full'"):
            client.submit("full", ROW, timeout=0.1)
        accepted = [client.submit("free", ROW, timeout=0.0) for _ in range(100)]
        until(lambda: all(ticket.entry_id for ticket in accepted))
        assert connection.xlen(keys.model_keys("free").normal) == 100
        refused = [error for t in waiting[ROOM:] if (error := t.exception(10))]
        assert {type(error) for error in refused} == {QueueFull}
        assert connection.xlen(keys.model_keys("full").normal) == ROOM
        # Room again: what is submitted now goes in at once.
        connection.delete(*keys.model_keys("full"))
        until(lambda: not client.may_wait("full"))
        again = client.submit("full", ROW)
        until(lambda: again.entry_id)


def test_what_waits_keeps_its_order(redis_url: str, connection: redis.Redis) -> None:
    publish(connection, "full", queue_max_rows=ROOM)
    stream = keys.model_keys("full").normal
    with Client(redis_url) as client:
        tickets = [client.submit("full", ROW) for _ in range(3 * ROOM)]
        for batch in range(3):
            mine = tickets[batch * ROOM : (batch + 1) * ROOM]
            until(lambda mine=mine: all(ticket.entry_id for ticket in mine))
            assert [entry_id for entry_id, _ in connection.xrange(stream)] == [
                ticket.entry_id for ticket in mine
            ]
            connection.delete(*keys.model_keys("full"))


def test_a_long_wait_is_held_in_short_ones_and_told_whole() -> None:
    now_s = 10.0
    holds: Holds[str] = Holds(lambda: now_s)
    assert holds.left_s("group") == 0
    holds.keep("group", 50.0)
    now_s = 10.5
    assert holds.left_s("group") == 49.5
    assert holds.left_s("other") == 0
    now_s = 11.0
    # Asked again now, since limits may have changed meanwhile.
    assert holds.left_s("group") == 0


def test_who_comes_behind_a_held_task_is_told_when_the_limit_has_room(
    redis_url: str, connection: redis.Redis
) -> None:
    publish(connection, "limited")
    limit = RateLimit(rows_per_s=0.02, burst_rows=1)
    WorkerInbox(Link(connection), "limited").attend("w", 60_000, limit)
    with Client(redis_url) as client:
        first = client.submit("limited", ROW)
        until(lambda: first.entry_id)
        client.submit("limited", ROW, timeout=30)
        for _ in range(3):
            refused = client.submit("limited", ROW, timeout=0).exception(10)
            assert isinstance(refused, RateLimited)
            assert 40 < refused.retry_after_s <= 50
