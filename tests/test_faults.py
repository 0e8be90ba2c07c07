"""Workers and Redis that die, stop or come back, with work under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from producer import Client
from producer.bell import bell_message
from producer.bulk import BulkProgress, run_bulk
from producer.embedded import EmbeddedRedis
from producer.errors import DeadlineExceeded, PoisonTask, TrtqError
from producer.link import Link
from producer.wire import decode_replies
from tests.support import models as onnx_models
from tests.support.processes import ROOT, start_worker, until
from workers.inbox import WorkerInbox
from workers.process import EXIT_FATAL
from workers.settings import EXIT_CONFIG

WIDTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: a slow one, and a checksum."""
    made = tmp_path_factory.mktemp("models")
    onnx_models.slow_model(made / "slow.onnx", width=WIDTH, work=2000)
    onnx_models.write_config(
        made, "slow", max_batch=4, max_rows_per_task=4, max_delay_ms=0, threads=1
    )
    onnx_models.checksum_model(made / "checksum.onnx", 16)
    onnx_models.write_config(made, "checksum", max_batch=64)
    return made


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A Redis of the test's own."""
    with EmbeddedRedis() as made:
        yield made


@pytest.fixture
def inbox(server: EmbeddedRedis) -> Iterator[WorkerInbox]:
    """The slow model's queue."""
    with redis.Redis.from_url(server.url, protocol=2) as connection:
        yield WorkerInbox(Link(connection), "slow")


def rows(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(3).random((count, WIDTH), dtype=np.float32)


def push_bell(server: EmbeddedRedis, queue: str, message: bytes) -> None:
    with redis.Redis.from_url(server.url) as connection:
        connection.lpush(queue, message)


def test_a_lost_bell_is_healed(server: EmbeddedRedis, folder: Path) -> None:
    start_worker(server.url, folder, name="publishes").stop()
    with Client(server.url) as client, redis.Redis.from_url(server.url) as connection:
        ticket = client.submit("slow", rows(1)[0])
        until(ticket.accepted)
        assert connection.delete("trtq.slow") == 1
        worker = start_worker(server.url, folder, name="heals")
        assert ticket.exception(20) is None
        assert "no bell and no turn" in worker.text
    assert worker.stop() == 0


def test_a_lost_device_ends_the_process_and_hands_its_tasks_back(
    server: EmbeddedRedis, folder: Path
) -> None:
    lost = start_worker(server.url, folder, name="lost", app="tests.support.dying_worker")
    with Client(server.url) as client:
        tickets = [client.submit("checksum", np.full(16, n, np.uint8)) for n in range(5)]
        assert lost.process.wait(30) == EXIT_FATAL
        assert "uncorrectable ECC error" in lost.text
        other = start_worker(server.url, folder, name="other")
        # Handed back, not waited for: the lease is longer than this.
        assert [ticket.exception(5) for ticket in tickets] == [None] * 5
    assert other.stop() == 0


def test_a_killed_workers_tasks_are_answered_by_another(
    server: EmbeddedRedis, inbox: WorkerInbox, folder: Path
) -> None:
    first = start_worker(server.url, folder, name="first", lease_ms="1000")
    with Client(server.url) as client:
        given = rows(120)
        tickets = [client.submit("slow", row) for row in given]
        until(lambda: sum(t.done() for t in tickets) >= 8 and inbox.look().claimed)
        first.kill()
        answered = sum(t.done() for t in tickets)
        assert answered < len(tickets)
        second = start_worker(server.url, folder, name="second", lease_ms="1000")
        results = np.array([t.result(60) for t in tickets])
        again = np.array(list(client.map("slow", given)))
        np.testing.assert_allclose(results, again, rtol=1e-4, atol=1e-5)
        until(lambda: inbox.look().rows == 0)
        assert second.stop() == 0


def test_a_worker_that_slept_beyond_its_lease_answers_nothing_twice(
    server: EmbeddedRedis, inbox: WorkerInbox, folder: Path
) -> None:
    first = start_worker(server.url, folder, name="first", lease_ms="500")
    with Client(server.url) as client:
        blobs: list[bytes] = []
        deliver = client._mailbox._deliver

        def listen(blob: bytes) -> None:
            blobs.append(blob)
            deliver(blob)

        client._mailbox._deliver = listen  # type: ignore[method-assign]
        tickets = [client.submit("slow", row) for row in rows(60)]
        until(lambda: sum(t.done() for t in tickets) >= 8 and inbox.look().claimed)
        first.process.send_signal(signal.SIGSTOP)
        second = start_worker(server.url, folder, name="second", lease_ms="500")
        assert all(t.exception(60) is None for t in tickets)
        # It wakes up with a batch in its slot and answers that are not wanted any more.
        first.process.send_signal(signal.SIGCONT)
        again = client.submit("slow", rows(1)[0])
        assert again.exception(30) is None
        assert first.stop() == 0
        assert second.stop() == 0
        answered = [reply.task_id for blob in blobs for reply in decode_replies(blob)]
        assert sorted(answered) == sorted(t.task_id for t in [*tickets, again])
        assert inbox.look().rows == 0


def test_a_stopping_worker_hands_back_what_it_has_not_started(
    server: EmbeddedRedis, inbox: WorkerInbox, folder: Path
) -> None:
    first = start_worker(server.url, folder, name="first", lease_ms="60000")
    with Client(server.url) as client:
        tickets = [client.submit("slow", row) for row in rows(200)]
        until(lambda: sum(t.done() for t in tickets) >= 8)
        assert first.stop() == 0
        state = inbox.look()
        assert 0 < state.normal < 200
        # No lease has to run out: another worker goes on at once.
        second = start_worker(server.url, folder, name="second", lease_ms="60000")
        assert all(t.exception(60) is None for t in tickets)
        assert second.stop() == 0


def test_bells_that_come_while_a_worker_stops(server: EmbeddedRedis, folder: Path) -> None:
    worker = start_worker(server.url, folder, lease_ms="1000")
    with Client(server.url) as client:
        tickets = [client.submit("slow", row) for row in rows(200)]
        until(lambda: sum(t.done() for t in tickets) >= 8)
        for _ in range(4):
            push_bell(server, "trtq.slow", bell_message("slow", "while it stops"))
        assert worker.stop() == 0
        for ticket in tickets:
            ticket.cancel()


def test_redis_restarts_under_a_turn_with_a_bell_prefetched(folder: Path, tmp_path: Path) -> None:
    with EmbeddedRedis(folder=tmp_path, appendonly=True) as server:
        worker = start_worker(server.url, folder, lease_ms="1000")
        with Client(server.url) as client:
            tickets = [client.submit("slow", row) for row in rows(120)]
            until(lambda: sum(t.done() for t in tickets) >= 8)
            for _ in range(3):
                push_bell(server, "trtq.slow", bell_message("slow", "one bell too many"))
            server.kill()
            server.start()
            late = [client.submit("slow", row) for row in rows(8)]
            assert all(t.exception(60) is None for t in tickets + late)
        assert worker.process.poll() is None
        assert worker.stop() == 0


def test_redis_loses_everything(folder: Path) -> None:
    with EmbeddedRedis() as server:
        worker = start_worker(server.url, folder, lease_ms="1000")
        with Client(server.url) as client:
            tickets = [client.submit("slow", row, deadline=4) for row in rows(120)]
            until(lambda: sum(t.done() for t in tickets) >= 8)
            server.kill()
            server.start()
            outcomes = [t.exception(30) for t in tickets]
            assert {type(o) for o in outcomes} <= {type(None), DeadlineExceeded}

            def again() -> bool:
                try:
                    return client.submit("slow", rows(1)[0], deadline=20).exception(30) is None
                except TrtqError:
                    return False

            until(again, 30)
        assert worker.stop() == 0


def test_a_task_that_no_worker_survives_is_poison(
    server: EmbeddedRedis, inbox: WorkerInbox, folder: Path
) -> None:
    with Client(server.url) as client:
        worker = start_worker(server.url, folder, lease_ms="500", max_deliveries="1")
        assert client.submit("slow", rows(1)[0]).exception(20) is None
        worker.stop()
        poison = client.submit("slow", rows(1)[0])
        good = client.submit("slow", rows(1)[0])
        until(lambda: poison.accepted() and good.accepted())
        # Two workers take it and die: once among others, once alone.
        (taken,) = inbox.claim("dies", 1).entries
        (again,) = until(lambda: inbox.reclaim("dies-alone", 1, 1, 1, True).entries)
        assert taken.entry_id == again.entry_id == poison.entry_id
        worker = start_worker(server.url, folder, lease_ms="500", max_deliveries="1")
        assert isinstance(poison.exception(30), PoisonTask)
        assert good.exception(30) is None
        assert inbox.look().dead == 1
        assert worker.stop() == 0


BULK = """
import sys
from pathlib import Path
from producer import Client, keys
from producer.bell import bell_message
from producer.bulk import run_bulk
with Client(sys.argv[1]) as client:
    run_bulk(client, "slow", Path(sys.argv[2]), Path(sys.argv[3]), rows_per_task=4, window=4,
             progress=lambda p: print(p.rows_done, flush=True))
"""


def test_a_killed_bulk_job_resumes_to_the_same_bytes(
    server: EmbeddedRedis, folder: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "in.npy", rows(400))
    worker = start_worker(server.url, folder, bulk_roots=str(tmp_path), lease_ms="1000")
    job = subprocess.Popen(
        [sys.executable, "-c", BULK, server.url, tmp_path / "in.npy", tmp_path / "out.npy"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert job.stdout is not None
    while int(job.stdout.readline()) < 40:
        pass
    os.kill(job.pid, signal.SIGKILL)
    job.wait(10)
    seen: list[BulkProgress] = []
    with Client(server.url) as client:
        summary = run_bulk(
            client,
            "slow",
            tmp_path / "in.npy",
            tmp_path / "out.npy",
            rows_per_task=4,
            resume=True,
            progress=seen.append,
        )
        assert summary.resumed_rows >= 40
        assert summary.failed == 0
        run_bulk(client, "slow", tmp_path / "in.npy", tmp_path / "whole.npy", rows_per_task=4)
    assert (tmp_path / "out.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert np.load(tmp_path / "out.npy").any(axis=1).all()
    assert worker.stop() == 0


def test_a_wrong_configuration_ends_the_worker_with_its_reason(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("path: bad.onnx\nmax_bach: 3\n")
    worker = start_worker(server.url, tmp_path, wait=False)
    assert worker.process.wait(30) == EXIT_CONFIG
    assert "max_batch" in worker.text
    assert "Traceback" not in worker.text
    (tmp_path / "bad.yaml").write_text("path: bad.onnx\n")
    worker = start_worker(server.url, tmp_path, wait=False)
    assert worker.process.wait(30) == EXIT_CONFIG
    assert "bad.onnx" in worker.text


def test_another_model_of_the_same_name_is_refused(
    server: EmbeddedRedis, folder: Path, tmp_path: Path
) -> None:
    onnx_models.identity_model(tmp_path / "checksum.onnx", 3)
    onnx_models.write_config(tmp_path, "checksum")
    worker = start_worker(server.url, folder)
    other = start_worker(server.url, tmp_path, name="other", wait=False)
    assert other.process.wait(30) == EXIT_CONFIG
    assert "a live worker serves another one" in other.text
    assert worker.stop() == 0
    after = start_worker(server.url, tmp_path, name="other")
    assert after.stop() == 0


def test_a_turn_never_raises_into_the_pool(server: EmbeddedRedis, folder: Path) -> None:
    """A bell for a model that the worker does not serve; then it serves as before."""
    worker = start_worker(server.url, folder, queues="trtq.slow")
    with Client(server.url) as client:
        push_bell(server, "trtq.slow", bell_message("nosuch", "test"))
        until(lambda: "does not serve model 'nosuch'" in worker.text)
        assert client.submit("slow", rows(1)[0]).exception(20) is None
    assert worker.stop() == 0
