"""The embedded redis-server, as an object and as `trtq redis`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from producer.embedded import EmbeddedRedis, server_binary
from producer.errors import MissingExtra, RedisUnavailable
from tests.support.processes import ROOT, until


def test_answers_on_loopback_until_closed() -> None:
    with EmbeddedRedis() as server:
        assert server.pid is not None
        process = psutil.Process(server.pid)
        with redis.Redis.from_url(server.url) as connection:
            assert connection.ping()
            assert connection.config_get("save") == {"save": ""}
        listening = [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        folder = Path(process.cwd())
    assert not process.is_running()
    assert not folder.exists()
    assert server.pid is None
    server.close()


def test_a_folder_keeps_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    for expected in (None, b"1"):
        with (
            EmbeddedRedis(folder=folder, appendonly=True) as server,
            redis.Redis.from_url(server.url) as connection,
        ):
            assert connection.get("kept") == expected
            connection.set("kept", 1)


def test_a_port_that_another_server_has_is_an_error() -> None:
    with EmbeddedRedis() as first:
        second = EmbeddedRedis(first.port)
        with pytest.raises(RedisUnavailable, match=f"port {first.port} .* is taken"):
            second.start()
        assert second.pid is None
        with redis.Redis.from_url(first.url) as connection:
            assert connection.ping()


def test_an_interrupted_start_leaves_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedRedis()
    started: list[int] = []

    def interrupted(folder: Path) -> None:
        started.append(server.pid or 0)
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert not psutil.pid_exists(started[0])


def test_a_missing_binary_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTQ_REDIS_SERVER", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'trtq\[embedded\]'"):
        server_binary()


def test_a_named_server_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTQ_REDIS_SERVER", sys.executable)
    assert server_binary() == Path(sys.executable)
    monkeypatch.setenv("TRTQ_REDIS_SERVER", "/none/redis-server")
    with pytest.raises(MissingExtra, match="/none/redis-server"):
        server_binary()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_runs_it_until_a_signal(number: int, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    command = [sys.executable, "-m", "producer.cli", "redis", "--port", "0", "--dir", str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with redis.Redis.from_url(url) as connection:
                server = psutil.Process(connection.info("server")["process_id"])
                assert connection.config_get("appendonly") == {"appendonly": "yes"}
            process.send_signal(number)
            assert process.wait(20) == 0
            until(lambda: not server.is_running())
        finally:
            process.kill()


def test_the_command_tells_when_the_server_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "producer.cli", "redis", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with redis.Redis.from_url(url) as connection:
                os.kill(connection.info("server")["process_id"], signal.SIGKILL)
            _, stderr = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "error [redis_unavailable]: redis-server ended by itself with -9" in stderr


_OWNER = """
import sys, threading
from producer.embedded import EmbeddedRedis

server = EmbeddedRedis()
# From a thread that ends: the server belongs to the process.
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_the_server_ends_with_a_killed_owner(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        try:
            assert owner.stdout is not None
            server = psutil.Process(int(owner.stdout.readline()))
            started = psutil.Process(owner.pid).children()
            assert server in started
            owner.send_signal(number)
            assert owner.wait(20) == -number
            until(lambda: not any(map(running, started)))
        finally:
            owner.kill()


def test_the_command_killed_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "producer.cli", "redis", "--port", "0"]
    command += ["--dir", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with redis.Redis.from_url(url) as connection:
                connection.set("kept", 1)
                server = psutil.Process(connection.info("server")["process_id"])
        finally:
            process.kill()
    until(lambda: not running(server))
    with (
        EmbeddedRedis(folder=tmp_path, appendonly=True) as again,
        redis.Redis.from_url(again.url) as connection,
    ):
        assert connection.get("kept") == b"1"


def test_nothing_is_left_of_a_server_that_ended() -> None:
    before = set(psutil.Process().children())
    server = EmbeddedRedis()
    for end in (server.kill, server.close):
        server.start()
        assert len(set(psutil.Process().children()) - before) == 2
        end()
        assert set(psutil.Process().children()) <= before
    server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    assert set(psutil.Process().children()) <= before
    server.close()


def running(process: psutil.Process) -> bool:
    """False for a zombie too: a container's first process may reap none."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
