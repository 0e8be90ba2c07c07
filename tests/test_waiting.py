"""`trtq worker` before its Redis is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from producer.connection import connect, wait_until_answers
from producer.embedded import EmbeddedRedis, free_port
from producer.errors import AccessDenied
from producer.link import Link
from tests.support import models
from tests.support.processes import ROOT, until
from workers.inbox import WorkerInbox


def test_says_once_that_it_waits() -> None:
    server = EmbeddedRedis(free_port())
    said: list[str] = []
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            server.start()

    try:
        wait_until_answers(server.url, said.append, sleep)
        assert len(sleeps) == 3
        assert len(said) == 1
        assert said[0].startswith(f"waiting: Redis at {server.url} does not answer")
        wait_until_answers(server.url, said.append, sleep)
        assert len(sleeps) == 3
        assert len(said) == 1
    finally:
        server.close()


def test_a_refused_login_is_no_reason_to_wait() -> None:
    with EmbeddedRedis() as server:
        url = server.url.replace("redis://", "redis://nobody:wrong@")
        with pytest.raises(AccessDenied, match="nobody"):
            wait_until_answers(url, pytest.fail, pytest.fail)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_waits_stops_when_asked(tmp_path: Path, number: signal.Signals) -> None:
    models.checksum_model(tmp_path / "checksum.onnx", 4)
    models.write_config(tmp_path, "checksum")
    url = f"redis://127.0.0.1:{free_port()}/0"
    worker = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "worker", "--models", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TRTQ_REDIS_URL": url},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert worker.stderr is not None
    with worker.stderr:
        try:
            assert b"waiting: " in worker.stderr.readline()
            # Again and again until it has ended: what comes after the first changes nothing.
            until(lambda: worker.send_signal(number) or worker.poll() is not None)
            assert worker.returncode == 0
            assert worker.stderr.read() == b""
        finally:
            worker.kill()
            worker.wait(10)


def test_a_worker_serves_once_redis_is_there(tmp_path: Path) -> None:
    server = EmbeddedRedis(free_port())
    folder = tmp_path / "models"
    folder.mkdir()
    models.checksum_model(folder / "checksum.onnx", 4)
    models.write_config(folder, "checksum")
    command = [sys.executable, "-m", "producer.cli", "worker", "--models", str(folder)]
    log = tmp_path / "worker.log"
    with log.open("wb") as output:
        worker = subprocess.Popen(
            [*command, "--infer-threads", "0"],
            cwd=ROOT,
            env={**os.environ, "TRTQ_REDIS_URL": server.url},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: "waiting: Redis at" in log.read_text())
        # Nothing was started that would write its banner over that line.
        assert len(log.read_text().splitlines()) == 1
        server.start()
        with connect(server.url) as connection:
            inbox = WorkerInbox(Link(connection), "checksum")
            until(lambda: inbox.look().workers, 60)
    finally:
        worker.terminate()
        try:
            assert worker.wait(60) == 0
        finally:
            worker.kill()
            server.close()
