"""Idempotency keys across clients, processes and a real worker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from typer.testing import CliRunner

from producer import AsyncClient, Client, ProducerSettings, keys
from producer.cli import app as cli
from producer.errors import (
    Cancelled,
    EngineFailed,
    InvalidInput,
    KeyConflict,
    QueueFull,
    RedisFull,
)
from producer.events import read_events
from producer.keyed import task_key
from producer.link import Link
from producer.purge import purge
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker, until

ROWS = np.random.default_rng(1).integers(0, 256, (16, 16), dtype=np.uint8)
SUMS = onnx_models.checksum(ROWS).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(made / "checksum.onnx", 16)
    onnx_models.write_config(made, "checksum", max_batch=8)
    onnx_models.row_failing_model(made / "failing.onnx")
    onnx_models.write_config(made, "failing", max_batch=8)
    return made


@pytest.fixture(scope="module")
def worker(redis_url: str, folder: Path) -> Iterator[WorkerHandle]:
    handle = start_worker(redis_url, folder)
    yield handle
    assert handle.stop() == 0


@pytest.fixture
def client(redis_url: str, worker: WorkerHandle) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


@pytest.fixture
def other(redis_url: str, worker: WorkerHandle) -> Iterator[Client]:
    """As a client of another process: of the same name."""
    with Client(redis_url) as made:
        yield made


@pytest.fixture
def idle(redis_url: str, client: Client) -> Iterator[str]:
    """A model that is published and has no worker, so that what is submitted stays queued."""
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        spec = client.spec("checksum").model_copy(update={"name": "idle"})
        raw.hset(keys.MODELS, "idle", spec.model_dump_json())
        yield "idle"
        purge(raw, "idle")
        raw.hdel(keys.MODELS, "idle")


def total(redis_url: str, name: str) -> int:
    """A counter of the live worker, from its own heartbeat."""
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        (report,) = raw.mget(raw.keys(keys.worker("*")))
        return int(json.loads(report)[name])


def test_eight_racing_processes_run_each_key_once(redis_url: str, worker: WorkerHandle) -> None:
    count, repeats, processes = 60, 3, 8
    before = total(redis_url, "rows")
    command = [sys.executable, "-m", "tests.support.keyed_load", redis_url]
    racing = [
        subprocess.Popen(
            [*command, str(seed), str(count), str(repeats)],
            cwd=ROOT,
            env=dict(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    try:
        for process in racing:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in racing:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [json.loads(process.communicate(timeout=90)[0]) for process in racing]
    finally:
        for process in racing:
            process.kill()
            process.wait(10)
    rows = np.random.default_rng(7).integers(0, 256, (count, 16), dtype=np.uint8)
    sums = onnx_models.checksum(rows).tolist()
    tasks: dict[int, set[str]] = {}
    for index, answer, task_id in (one for several in answers for one in several):
        assert answer == sums[index]
        tasks.setdefault(index, set()).add(task_id)
    assert sum(len(several) for several in answers) == count * repeats * processes
    assert all(len(ids) == 1 for ids in tasks.values())
    assert len(set.union(*tasks.values())) == count
    # The marker comes after all of them; when the heartbeat has counted it, it has counted all.
    with Client(redis_url) as client:
        client.submit("checksum", rows[0]).result(20)
    until(lambda: total(redis_url, "rows") > before + count)
    assert total(redis_url, "rows") == before + count + 1


def test_repeats_share_the_task_and_its_answer(client: Client, other: Client) -> None:
    first = client.submit("checksum", ROWS[0], key="share")
    again = client.submit("checksum", ROWS[0], key="share")
    elsewhere = other.submit("checksum", ROWS[:1], key="share")
    assert int(first.result(20)) == int(again.result(20)) == SUMS[0]
    assert elsewhere.result(20).tolist() == SUMS[:1]
    late = other.submit("checksum", ROWS[0], key="share")
    assert int(late.result(20)) == SUMS[0]
    ids = {first.task_id, again.task_id, elsewhere.task_id, late.task_id}
    assert ids == {first.task_id}
    assert other.result(late.task_id).tolist() == SUMS[:1]
    assert not first.repeated
    assert late.repeated


def test_clients_of_another_name_have_keys_of_their_own(client: Client, redis_url: str) -> None:
    mine = client.submit("checksum", ROWS[3], key="names")
    with Client(redis_url, name="other") as stranger:
        theirs = stranger.submit("checksum", ROWS[4], key="names")
        assert [int(mine.result(20)), int(theirs.result(20))] == [SUMS[3], SUMS[4]]


def test_a_repeat_waits_for_a_task_that_is_queued(
    client: Client, other: Client, idle: str, redis_url: str
) -> None:
    first = client.submit(idle, ROWS[1], key="wait")
    until(first.accepted)
    repeat = other.submit(idle, ROWS[1], key="wait")
    until(lambda: repeat.repeated)
    assert not repeat.done()
    assert repeat.cancel() is False
    assert first.cancel() is False
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        assert purge(raw, idle) == 1
    for ticket in (first, repeat):
        assert isinstance(ticket.exception(10), Cancelled)


def test_a_cancelled_task_frees_its_key(client: Client, other: Client, idle: str) -> None:
    first = client.submit(idle, ROWS[1], key="cancel")
    until(first.accepted)
    assert first.cancel() is True
    again = other.submit(idle, ROWS[2], key="cancel")
    until(again.accepted)
    assert not again.repeated
    assert not again.done()


def test_other_inputs_conflict_and_errors_of_a_run_are_kept(
    client: Client, other: Client, redis_url: str
) -> None:
    client.submit("checksum", ROWS[4], key="conflict").result(20)
    error = other.submit("checksum", ROWS[5], key="conflict").exception(20)
    assert isinstance(error, KeyConflict)
    assert error.code == "key_conflict"
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        until(lambda: read_events(Link(raw), "checksum").get(("refused", "key_conflict")))
    bad = np.array([99], dtype=np.int64)
    failed = client.submit("failing", bad, key="bad")
    assert isinstance(failed.exception(20), EngineFailed)
    repeat = other.submit("failing", bad, key="bad")
    assert isinstance(repeat.exception(20), EngineFailed)
    assert repeat.task_id == failed.task_id


def test_a_window_ends(client: Client, other: Client, redis_url: str) -> None:
    first = client.submit("checksum", ROWS[6], key="window", key_window_s=120)
    assert int(first.result(20)) == SUMS[6]
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        name = task_key("client", "window", 120, 1, ()).name
        record = keys.record("checksum", name)
        assert 60 < raw.ttl(record) <= 120
        assert raw.ttl(keys.result(first.task_id)) > 60
        # What Redis does at the end of the window.
        raw.delete(record)
    assert int(other.submit("checksum", ROWS[7], key="window").result(20)) == SUMS[7]


def test_a_queue_that_is_full_takes_no_key(client: Client, idle: str, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        small = client.spec("checksum").model_copy(update={"name": idle, "queue_max_rows": 8})
        raw.hset(keys.MODELS, idle, small.model_dump_json())
        with Client(redis_url, settings=ProducerSettings(default_timeout_s=0)) as own:
            until(own.submit(idle, ROWS[:8], key="fills").accepted)
            refused = own.submit(idle, ROWS[8], key="refused")
            assert isinstance(refused.exception(20), QueueFull)
            # What joins a queued task needs no room.
            joined = own.submit(idle, ROWS[:8], key="fills")
            until(lambda: joined.repeated)
            assert purge(raw, idle) == 1
            again = own.submit(idle, ROWS[9], key="refused")
            until(again.accepted)
            assert not again.done()


def test_a_key_and_its_window_are_checked_at_once(client: Client) -> None:
    with pytest.raises(InvalidInput, match="not empty"):
        client.submit("checksum", ROWS[0], key="")
    with pytest.raises(InvalidInput, match="without a key"):
        client.submit("checksum", ROWS[0], key_window_s=5)


def test_a_full_redis_is_named(client: Client, redis_url: str) -> None:
    client.submit("checksum", ROWS[10], key="before").result(20)
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        raw.config_set("maxmemory-policy", "noeviction")
        raw.config_set("maxmemory", 1)
        try:
            full = client.submit("checksum", ROWS[11], key="full", timeout=0).exception(20)
            known = client.submit("checksum", ROWS[10], key="before", timeout=0)
            assert int(known.result(20)) == SUMS[10]
        finally:
            raw.config_set("maxmemory", 0)
    assert isinstance(full, RedisFull)
    assert int(client.submit("checksum", ROWS[11], key="full").result(20)) == SUMS[11]


def test_asyncio_map_and_the_command(client: Client, redis_url: str) -> None:
    async def twice() -> list[int]:
        async with AsyncClient(redis_url) as own:
            tickets = [await own.submit("checksum", ROWS[12], key="async") for _ in range(2)]
            return [int(await ticket) for ticket in tickets]

    assert asyncio.run(twice()) == [SUMS[12]] * 2
    same = [ROWS[13]] * 5
    found = dict(client.as_completed("checksum", same, window=3, key="all the same"))
    assert {index: int(value) for index, value in found.items()} == dict.fromkeys(
        range(5), SUMS[13]
    )
    options = ["checksum", "-", "--key", "command", "--key-window", "60", "--redis-url", redis_url]
    for row, code in ((ROWS[14], 0), (ROWS[14], 0), (ROWS[15], 2)):
        ran = CliRunner().invoke(cli, ["submit", *options], input=json.dumps(row.tolist()))
        assert ran.exit_code == code, ran.output
        assert (str(SUMS[14]) if code == 0 else "key_conflict") in ran.output
