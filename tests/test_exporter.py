"""The exporter over real HTTP, on a real Redis."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis

from producer import keys
from producer.embedded import EmbeddedRedis, free_port
from producer.errors import Unavailable
from producer.exporter import Exporter
from producer.link import Link
from tests.support.http import scrape, value
from tests.support.processes import ROOT, until
from tests.support.specs import SPEC
from workers.inbox import WorkerInbox


@pytest.fixture
def url(connection: redis.Redis) -> Iterator[str]:
    exporter = Exporter(connection, "127.0.0.1", 0)
    exporter.start()
    yield f"http://127.0.0.1:{exporter.port}/metrics"
    exporter.close()


def test_queues_by_model_and_priority(connection: redis.Redis, url: str) -> None:
    inbox = WorkerInbox(Link(connection), "m")
    connection.hset(keys.MODELS, "m", SPEC.model_dump_json())
    inbox.attend("w1", 5000)
    for flush, priority in enumerate((0, 2, 2)):
        inbox.add(SPEC, priority, "c", flush, [(2, b"task")])
    connection.xadd(inbox.keys.dead_letters, {"task": "c-1"})
    samples = scrape(url)
    assert value(samples, "trtq_redis_up") == 1
    assert value(samples, "trtq_queue_tasks", model="m", priority="high") == 1
    assert value(samples, "trtq_queue_tasks", model="m", priority="normal") == 0
    assert value(samples, "trtq_queue_tasks", model="m", priority="low") == 2
    assert value(samples, "trtq_queue_rows", model="m") == 6
    assert value(samples, "trtq_queue_bells", model="m") == 1
    assert value(samples, "trtq_queue_workers", model="m") == 1
    assert value(samples, "trtq_queue_dead_tasks", model="m") == 1
    assert value(samples, "trtq_queue_max_rows", model="m") == SPEC.queue_max_rows
    name = "trtq_queue_oldest_task_age_seconds"
    assert value(samples, name, model="m", priority="normal") == 0
    until(lambda: value(scrape(url), name, model="m", priority="high") > 0.01)
    first = value(samples, "trtq_redis_cpu_seconds_total")
    assert value(scrape(url), "trtq_redis_cpu_seconds_total") >= first > 0


def test_reads_leave_no_connection_behind(connection: redis.Redis, url: str) -> None:
    connection.hset(keys.MODELS, "m", SPEC.model_dump_json())
    scrape(url)
    before = value(scrape(url), "trtq_redis_clients")
    for _ in range(5):
        after = value(scrape(url), "trtq_redis_clients")
    assert after == before


def test_a_redis_that_is_away_and_comes_back() -> None:
    port = free_port()
    with EmbeddedRedis(port) as server, redis.Redis.from_url(server.url, protocol=2) as connection:
        exporter = Exporter(connection, "127.0.0.1", 0)
        exporter.start()
        url = f"http://127.0.0.1:{exporter.port}/metrics"
        assert value(scrape(url), "trtq_redis_up") == 1
        server.close()
        assert scrape(url) == {("trtq_redis_up", ()): 0.0}
        with EmbeddedRedis(port):
            assert value(scrape(url), "trtq_redis_up") == 1
        exporter.close()


def test_a_taken_port_is_named(connection: redis.Redis, url: str) -> None:
    port = int(url.split(":")[2].partition("/")[0])
    with pytest.raises(Unavailable, match=f"{port}.*--port"):
        Exporter(connection, "127.0.0.1", port).start()


def test_the_command_serves_until_sigterm(redis_url: str) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "exporter", "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "TRTQ_REDIS_URL": redis_url},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert f"http://127.0.0.1:{port}/metrics" in process.stdout.readline().decode()
        assert value(scrape(f"http://127.0.0.1:{port}/metrics"), "trtq_redis_up") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()  # type: ignore[union-attr]
