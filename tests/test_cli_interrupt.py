"""Commands as processes: watched, interrupted, refused by the server, piped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import redis

from producer import ModelSpec, TensorSpec, keys
from producer.embedded import EmbeddedRedis
from tests.support.processes import ROOT, until


@pytest.fixture
def idle_spec() -> ModelSpec:
    """A model that no worker serves, so that its tasks wait."""
    tensor = TensorSpec(name="x", dtype="float32", shape=(2,))
    return ModelSpec(
        name="idle", inputs=(tensor,), outputs=(tensor,), max_batch=4, max_rows_per_task=4
    )


@pytest.fixture
def idle(connection: redis.Redis, idle_spec: ModelSpec) -> str:
    """The same, published."""
    connection.hset(keys.MODELS, "idle", idle_spec.model_dump_json())
    return "idle"


@contextmanager
def trtq(
    redis_url: str, output: Path, *arguments: str, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The command as a process that writes both streams to `output`."""
    with (
        output.open("wb") as stream,
        subprocess.Popen(
            [sys.executable, "-m", "producer.cli", *arguments],
            cwd=ROOT,
            env={**os.environ, "TRTQ_REDIS_URL": redis_url, **env},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_an_interrupted_bulk_job_says_how_to_go_on(
    redis_url: str, connection: redis.Redis, idle: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((100, 2), np.float32))
    files = (str(tmp_path / "rows.npy"), str(tmp_path / "out.npy"))
    output = tmp_path / "log"
    with trtq(redis_url, output, "bulk", idle, *files) as process:
        until(lambda: connection.xlen(keys.model_keys(idle).low) == 25)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    text = output.read_text()
    assert "--resume" in text
    assert "Traceback" not in text
    # What nobody has begun was taken back, and the job's state is there to go on from.
    assert connection.xlen(keys.model_keys(idle).low) == 0
    assert (tmp_path / "out.npy.state").exists()


def test_a_bulk_job_stops_when_redis_is_gone_and_can_be_resumed(
    idle_spec: ModelSpec, tmp_path: Path
) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((100, 2), np.float32))
    arguments = ("bulk", "idle", str(tmp_path / "rows.npy"), str(tmp_path / "out.npy"))
    output = tmp_path / "log"
    with (
        EmbeddedRedis(folder=tmp_path / "data") as server,
        redis.Redis.from_url(server.url, protocol=2) as raw,
    ):
        raw.config_set("requirepass", "hidden")
        raw.hset(keys.MODELS, "idle", idle_spec.model_dump_json())
        url = server.url.replace("redis://", "redis://:hidden@")
        options = ("--redis-patience", "0.5")
        with trtq(url, output, *arguments, *options, TRTQ_SPEC_TTL_S="0") as process:
            until(lambda: raw.xlen(keys.model_keys("idle").low) == 25)
            server.kill()
            assert process.wait(60) == 1
    lines = [line for line in output.read_text().splitlines() if line.startswith("error ")]
    (line,) = lines
    assert line.startswith("error [redis_unavailable]: the bulk job stopped after 0.5 s")
    assert "redis://:***@127.0.0.1" in line
    assert "start it" in line
    assert "--resume" in line
    assert "hidden" not in output.read_text()
    assert (tmp_path / "out.npy.state").exists()


def test_watch_goes_on_over_an_outage_of_redis(tmp_path: Path) -> None:
    output = tmp_path / "log"
    with EmbeddedRedis(folder=tmp_path / "data") as server:
        arguments = ("status", "--watch", "--interval", "0.1")
        with trtq(server.url, output, *arguments, TTY_COMPATIBLE="1") as process:
            until(lambda: "no models" in output.read_text())
            server.kill()
            until(lambda: "does not answer" in output.read_text())
            before = output.stat().st_size
            server.start()
            until(lambda: "no models" in output.read_bytes()[before:].decode())
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
    assert "Traceback" not in output.read_text()


def test_an_error_reply_of_redis_is_one_line(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    connection.set(keys.MODELS, "no hash")
    output = tmp_path / "log"
    with trtq(redis_url, output, "models") as process:
        assert process.wait(20) == 1
    assert output.read_text().startswith("error [redis_refused]: WRONGTYPE")


def test_a_wrong_setting_is_named(redis_url: str, tmp_path: Path) -> None:
    output, inputs = tmp_path / "log", tmp_path / "x.json"
    inputs.write_text("[1]")
    with trtq(redis_url, output, "submit", "m", str(inputs), TRTQ_STORE_S="soon") as process:
        assert process.wait(20) == 2
    assert output.read_text().startswith("error [config]: TRTQ_STORE_S='soon': ")


def test_json_on_stdout_stays_json(redis_url: str, idle: str, tmp_path: Path) -> None:
    output = tmp_path / "log"
    with trtq(redis_url, output, "status", "--json") as process:
        assert process.wait(20) == 0
    assert json.loads(output.read_text())["queues"]["idle"]["normal"] == 0
