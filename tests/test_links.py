"""Real workers and clients whose connections to Redis break in ways that TCP does not report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import redis

from benchmarks.chaos.proxy import Proxy
from producer import Client, keys
from producer.embedded import EmbeddedRedis
from producer.inbox import REPLY_TTL_S, Inbox
from producer.link import Link
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker, until

ROWS = np.random.default_rng(5).integers(0, 256, (64, 16), dtype=np.uint8)
SUMS = onnx_models.checksum(ROWS).tolist()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as made:
        yield made


@pytest.fixture(scope="module")
def proxy(server: EmbeddedRedis) -> Iterator[Proxy]:
    with Proxy(server.port) as made:
        yield made


@pytest.fixture(scope="module")
def worker(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHandle]:
    """The only worker, behind the proxy."""
    folder = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(folder / "checksum.onnx", 16)
    onnx_models.write_config(folder, "checksum", max_batch=16)
    handle = start_worker(f"redis://127.0.0.1:{proxy.port}/0", folder, lease_ms="60000")
    yield handle
    assert handle.stop() == 0


def sums(client: Client, timeout: float = 60.0) -> list[int]:
    tickets = [client.submit("checksum", row, deadline=timeout) for row in ROWS]
    return [int(ticket.result(timeout)) for ticket in tickets]


def test_a_worker_hears_bells_again_after_its_links_went_deaf(
    server: EmbeddedRedis, proxy: Proxy, worker: WorkerHandle
) -> None:
    with Client(server.url) as client:
        assert sums(client) == SUMS
        # Open and dead: the worker's wait for bells and its acknowledgements get no answer.
        proxy.half_open()
        assert sums(client, 30) == SUMS


def test_lost_answers_cost_no_lease(
    server: EmbeddedRedis, proxy: Proxy, worker: WorkerHandle
) -> None:
    """The lease is a minute: what Redis gave away in a lost answer must come back before."""
    with Client(server.url) as client:
        for _ in range(3):
            tickets = [client.submit("checksum", row, deadline=30) for row in ROWS]
            proxy.lose_answers(0.1)
            assert [int(ticket.result(30)) for ticket in tickets] == SUMS


def test_a_client_whose_links_went_deaf_gets_its_answers(
    server: EmbeddedRedis, proxy: Proxy, worker: WorkerHandle
) -> None:
    with Client(f"redis://127.0.0.1:{proxy.port}/0") as client:
        assert sums(client) == SUMS
        tickets = [client.submit("checksum", row, deadline=40) for row in ROWS]
        proxy.half_open()
        assert [int(ticket.result(45)) for ticket in tickets] == SUMS


def test_what_a_killed_client_leaves_behind_expires(
    server: EmbeddedRedis, worker: WorkerHandle
) -> None:
    code = """
import os, sys
import numpy as np
from producer import Client, keys
client = Client(sys.argv[1]).start()
tickets = [client.submit("checksum", np.full(16, n, np.uint8)) for n in range(64)]
while not all(ticket.accepted() for ticket in tickets):
    pass
print(client.client_id, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, server.url], cwd=ROOT, stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == -9
    client_id = done.stdout.decode().strip()
    with redis.Redis.from_url(server.url, protocol=2) as raw:
        inbox = Inbox(Link(raw), "checksum")
        until(lambda: inbox.look().rows == 0)
        key = keys.reply(client_id)
        assert 0 < raw.ttl(key) <= REPLY_TTL_S
        left = [name for name in raw.scan_iter(f"*{client_id}*") if raw.ttl(name) == -1]
        assert left == []
