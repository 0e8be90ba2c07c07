"""Rate limits: the bucket's rule against a model of it, the queue, clients that wait, workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from producer import Client, keys
from producer.errors import ConfigError, QueueFull, RateLimited
from producer.events import read_events
from producer.limits import RateLimit
from producer.link import Link
from producer.scripts import shared
from producer.task import RowReference
from tests.support import models as onnx_models
from tests.support.processes import start_worker, until
from tests.support.specs import SPEC
from workers.inbox import WorkerInbox
from workers.models import load_model

#: Takes rows from two buckets at a given time, as `_add.lua` does with Redis' own.
TAKE = (
    shared("_rate.lua")
    + """
local now = tonumber(ARGV[1])
local buckets = {open_bucket(KEYS[1], ARGV[2], tonumber(ARGV[3]), now),
                 open_bucket(KEYS[2], ARGV[4], tonumber(ARGV[5]), now)}
local answer = {}
for index, rows in ipairs(cmsgpack.unpack(ARGV[6])) do
  answer[index] = take_rows(buckets, rows)
end
for index, bucket in ipairs(buckets) do
  close_bucket(bucket)
  answer[#answer + 1] = redis.call('PTTL', bucket.key)
  -- The time of this test stands still or jumps, Redis' own goes on.
  redis.call('PERSIST', bucket.key)
end
return answer
"""
)


class Bucket:
    """What a bucket promises, said with tokens: `burst` at first, `per_ms` more each ms."""

    def __init__(self, rows_per_s: float, burst_rows: int) -> None:
        self.per_ms = rows_per_s / 1000
        self.burst_rows = burst_rows
        self.tokens = float(burst_rows)
        self.at_ms = 0

    def advance(self, now_ms: int) -> None:
        earned = max(0, now_ms - self.at_ms) * self.per_ms
        self.tokens = min(float(self.burst_rows), self.tokens + earned)
        self.at_ms = now_ms

    def wait_ms(self, rows: int) -> float:
        return max(0.0, (rows - self.tokens) / self.per_ms)


@settings(max_examples=150, deadline=None)
@given(
    rates=st.tuples(st.floats(0.5, 1e5), st.floats(0.5, 1e5)),
    bursts=st.tuples(st.integers(4, 300), st.integers(4, 300)),
    steps=st.lists(
        st.tuples(st.integers(0, 5000), st.lists(st.integers(1, 4), min_size=1, max_size=8)),
        max_size=12,
    ),
)
def test_two_buckets_admit_what_their_tokens_allow(
    module_redis: redis.Redis,
    rates: tuple[float, float],
    bursts: tuple[int, int],
    steps: list[tuple[int, list[int]]],
) -> None:
    module_redis.flushdb()
    models = [Bucket(rate, burst) for rate, burst in zip(rates, bursts, strict=True)]
    # Far enough apart from the real clock's small numbers that a float would lose milliseconds.
    now_ms = 1_800_000_000_000
    for model in models:
        model.at_ms = now_ms
    for pause_ms, tasks in steps:
        now_ms += pause_ms
        for model in models:
            model.advance(now_ms)
        args = [now_ms, rates[0], bursts[0], rates[1], bursts[1], msgpack.packb(tasks)]
        *answers, ttl1_ms, ttl2_ms = module_redis.eval(TAKE, 2, "b1", "b2", *args)
        for rows, answer in zip(tasks, answers, strict=True):
            wait_ms = max(model.wait_ms(rows) for model in models)
            if answer == 0:
                assert wait_ms < 1e-3
                for model in models:
                    model.tokens -= rows
            else:
                assert wait_ms > 0
                assert abs(answer - math.ceil(wait_ms)) <= 1
        for ttl_ms, model in zip((ttl1_ms, ttl2_ms), models, strict=True):
            # A bucket is kept for as long as it is not full; the script itself may take a while.
            left_ms = (model.burst_rows - model.tokens) / model.per_ms
            assert left_ms - 1000 <= ttl_ms <= math.ceil(left_ms) + 1
            if ttl_ms == -2:
                model.tokens = float(model.burst_rows)


@pytest.fixture(scope="module")
def module_redis(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, protocol=2) as made:
        yield made


@pytest.fixture
def inbox(connection: redis.Redis) -> WorkerInbox:
    return WorkerInbox(Link(connection), "m")


def limit(inbox: WorkerInbox, **values: float) -> None:
    inbox.attend("w", 60_000, RateLimit.model_validate(values).with_bursts(4))


def test_a_clock_that_goes_back_earns_nothing_and_takes_nothing(module_redis: redis.Redis) -> None:
    module_redis.flushdb()
    now_ms = 1_800_000_000_000
    hour_ms = 3_600_000
    for at_ms, expected in (
        (now_ms, [0, 0]),
        (now_ms - 5000, [1000, 1000]),
        # Otherwise nothing would be let in for an hour.
        (now_ms - hour_ms, [0, 0]),
        (now_ms - hour_ms, [1000, 1000]),
    ):
        args = [at_ms, 1, 2, 1, 2, msgpack.packb([1, 1])]
        assert module_redis.eval(TAKE, 2, "b1", "b2", *args)[:2] == expected


def test_the_model_limit_holds_for_all_clients_and_priorities(inbox: WorkerInbox) -> None:
    limit(inbox, rows_per_s=0.01, burst_rows=6)
    _, ids = inbox.add(SPEC, 1, "a.1", 1, [(4, b"x"), (4, b"y"), (1, b"z")])
    assert isinstance(ids[0], bytes)
    assert isinstance(ids[2], bytes)
    assert isinstance(ids[1], int)
    assert 190_000 <= ids[1] <= 200_000
    _, ids = inbox.add(SPEC, 0, "b.1", 1, [(2, b"x"), (1, b"x")])
    assert [type(i) for i in ids] == [int, bytes]
    assert inbox.look().rows == 6


def test_the_client_limit_counts_by_name(inbox: WorkerInbox) -> None:
    limit(inbox, per_client_rows_per_s=0.01, per_client_burst_rows=4)
    _, first = inbox.add(SPEC, 1, "batch.aaa", 1, [(4, b"x")])
    _, same_name = inbox.add(SPEC, 1, "batch.bbb", 1, [(1, b"x")])
    _, other = inbox.add(SPEC, 1, "web.aaa", 1, [(4, b"x")])
    assert [type(ids[0]) for ids in (first, same_name, other)] == [bytes, int, bytes]


def test_what_the_queue_refuses_takes_no_tokens(inbox: WorkerInbox) -> None:
    limit(inbox, rows_per_s=0.01, burst_rows=40)
    _, ids = inbox.add(SPEC, 1, "a.1", 1, [(4, b"x")] * 7)
    assert [i is None for i in ids] == [False] * 5 + [True] * 2
    for entry in inbox.claim("w", 99).entries:
        inbox.cancel(1, entry.entry_id, 4, 1)
    small = SPEC.model_copy(update={"queue_max_rows": 1000})
    _, ids = inbox.add(small, 1, "a.1", 2, [(4, b"x")] * 6)
    assert [isinstance(i, bytes) for i in ids] == [True] * 5 + [False]


def test_a_repeated_flush_takes_nothing_again(inbox: WorkerInbox) -> None:
    limit(inbox, rows_per_s=0.01, burst_rows=5)
    first = inbox.add(SPEC, 1, "a.1", 1, [(4, b"x"), (4, b"y")])
    assert inbox.add(SPEC, 1, "a.1", 1, [(4, b"x"), (4, b"y")])[1] == first[1]
    assert isinstance(inbox.add(SPEC, 1, "a.1", 2, [(1, b"z")])[1][0], bytes)


def test_buckets_expire_and_limits_come_and_go(inbox: WorkerInbox, connection: redis.Redis) -> None:
    limit(inbox, rows_per_s=10, burst_rows=4, per_client_rows_per_s=5, per_client_burst_rows=4)
    inbox.add(SPEC, 1, "a.1", 1, [(4, b"x")])
    assert 300 < connection.pttl(inbox.keys.bucket) <= 400
    assert 700 < connection.pttl(keys.client_bucket("m", "a.1")) <= 800
    assert isinstance(inbox.add(SPEC, 1, "a.1", 2, [(4, b"x")])[1][0], int)
    inbox.attend("w", 60_000)
    assert connection.exists(inbox.keys.limits) == 0
    assert isinstance(inbox.add(SPEC, 1, "a.1", 3, [(4, b"x")])[1][0], bytes)


def test_a_rate_that_nobody_can_wait_for_spoils_no_queue(
    inbox: WorkerInbox, connection: redis.Redis
) -> None:
    """Workers refuse it; a producer can write it by itself."""
    connection.hset(inbox.keys.limits, mapping={"rows_per_s": "1e-300", "burst_rows": "4"})
    assert isinstance(inbox.add(SPEC, 1, "a.1", 1, [(4, b"x")])[1][0], bytes)
    assert inbox.look().rows == 4
    assert inbox.add(SPEC, 1, "a.1", 2, [(4, b"x")])[1] == [2**52]
    assert inbox.look().rows == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "set rows_per_s"),
        ("{burst_rows: 99}", "burst_rows is set without rows_per_s"),
        ("{rows_per_s: 0}", "rate_limit.rows_per_s is 0"),
        ("{rows_per_s: 1.0e-300}", "rate_limit.rows_per_s is 1e-300"),
        ("{rows_per_s: .inf}", "rate_limit.rows_per_s is inf"),
        ("{rows_per_s: 5, burst_rows: 3}", "burst of 3 rows, less than the 4 rows"),
        ("{per_client_rows_per_s: 5, per_client_burst_rows: 3}", "burst of 3 rows"),
        ("{rows: 5}", "rate_limit.rows is 5"),
    ],
)
def test_limits_that_make_no_sense_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(f"path: m.onnx\nmax_batch: 4\nrate_limit: {text}\n")
    with pytest.raises(ConfigError, match=words):
        load_model(file)


def test_a_burst_that_is_not_given_is_a_seconds_rows_and_holds_a_task() -> None:
    given_rates = RateLimit(rows_per_s=100.5, per_client_rows_per_s=2)
    filled = given_rates.with_bursts(8)
    assert (filled.burst_rows, filled.per_client_burst_rows) == (101, 8)
    assert RateLimit(rows_per_s=1, burst_rows=50).with_bursts(8).burst_rows == 50


def test_a_worker_publishes_limits_and_clients_wait_or_are_told(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    onnx_models.checksum_model(tmp_path / "checksum.onnx", 16)
    rate_limit = {"per_client_rows_per_s": 5, "per_client_burst_rows": 4}
    onnx_models.write_config(tmp_path, "checksum", max_batch=4, rate_limit=rate_limit)
    rows = np.random.default_rng(3).integers(0, 256, (10, 16), dtype=np.uint8)
    worker = start_worker(redis_url, tmp_path)
    try:
        with Client(redis_url, name="other") as other, Client(redis_url) as client:
            patient = [client.submit("checksum", row, timeout=30) for row in rows]
            at_once = client.submit("checksum", rows[:4], timeout=0).exception(10)
            assert isinstance(at_once, RateLimited)
            assert isinstance(at_once, QueueFull)
            assert 0 < at_once.retry_after_s <= 1
            link = Link(connection)
            until(lambda: read_events(link, "checksum").get(("refused", "rate_limited")))
            assert other.submit("checksum", rows[:4], timeout=0).result(10).shape == (4,)
            sums = onnx_models.checksum(rows).tolist()
            assert [int(ticket.result(30)) for ticket in patient] == sums
            # Rows that stay in files count as well.
            until(lambda: not connection.exists(keys.client_bucket("checksum", client.client_id)))
            reference = RowReference((("x", "/none.npy"),), (("sum", "/out.npy"),), 0, 4)
            client.submit_reference("checksum", reference).exception(10)
            assert connection.pttl(keys.client_bucket("checksum", client.client_id)) > 0
        assert connection.hgetall("trtq:{checksum}:limits") == {
            b"per_client_rows_per_s": b"5.0",
            b"per_client_burst_rows": b"4",
        }
        differs = tmp_path / "differs"
        differs.mkdir()
        (tmp_path / "checksum.onnx").rename(differs / "checksum.onnx")
        onnx_models.write_config(differs, "checksum", max_batch=4)
        refused = start_worker(redis_url, differs, name="differs", wait=False)
        assert refused.process.wait(40) == 78
        assert "serves another one under that name" in refused.text
    finally:
        assert worker.stop() == 0
