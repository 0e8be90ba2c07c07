"""What `trtq worker` refuses before it starts anything: exit code 78 and one line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from celery.bin.base import LogLevel
from typer.testing import CliRunner

from producer.cli import app
from producer.embedded import EmbeddedRedis
from tests.support import models as onnx_models
from tests.support.no_redis import http_server
from tests.support.processes import ROOT
from workers.settings import EXIT_CONFIG


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx_models.checksum_model(tmp_path / "checksum.onnx", 4)
    onnx_models.write_config(tmp_path, "checksum")
    return tmp_path


@pytest.fixture(scope="module")
def locked() -> Iterator[EmbeddedRedis]:
    """A Redis that wants a password."""
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as connection:
        connection.config_set("requirepass", "hidden")
        yield server


@pytest.fixture
def refused(folder: Path, locked: EmbeddedRedis) -> Callable[..., str]:
    """Runs `trtq worker` with options and variables; the one line with which it ends."""

    def run(*options: str, **env: str) -> str:
        variables = {"TRTQ_REDIS_URL": locked.url, "TRTQ_MODELS": str(folder), **env}
        shown = CliRunner(env=variables).invoke(app, ["worker", *options])
        assert shown.exit_code == EXIT_CONFIG, shown.output
        assert shown.stdout == ""
        assert shown.stderr.startswith("trtq worker: ")
        assert shown.stderr.count("\n") == 1
        return shown.stderr

    return run


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (("--devices", "gpu"), {}, "--devices 'gpu': use cpu, all, "),
        (("--models", "/none"), {}, "--models '/none' is no folder"),
        (("--bulk-root", "/none"), {}, "--bulk-root '/none' is no folder"),
        (("--name", "a b"), {}, "'a b'"),
        (("--metrics-port", "70000"), {}, "'--metrics-port' "),
        (("--metrics-port", "65535"), {}, "2 ports from there do not exist"),
        (("--loglevel", "blah"), {}, "'info', 'warning', 'error', 'critical', 'fatal'"),
        ((), {"TRTQ_METRICS_PORT": "high"}, "'TRTQ_METRICS_PORT'"),
        ((), {"TRTQ_LEASE_MS": "0"}, "TRTQ_LEASE_MS='0': "),
        ((), {"TRTQ_STORE_S": "soon"}, "TRTQ_STORE_S='soon': "),
        ((), {"TRTQ_REDIS_URL": "http://u:secret@host"}, "Redis URL 'http://u:***@host'"),
        ((), {"TRTQ_REDIS_PASSWORD_FILE": "/none"}, "TRTQ_REDIS_PASSWORD_FILE='/none'"),
    ],
)
def test_a_wrong_option_or_setting(
    refused: Callable[..., str], options: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    assert said in refused(*options, **variables)


@pytest.mark.parametrize("level", ["DEBUG", "Warning", "error", "FATAL"])
def test_levels_are_celerys_in_any_case(refused: Callable[..., str], level: str) -> None:
    assert "refused the login" in refused("--loglevel", level)
    assert LogLevel().convert(level.lower(), None, None)


def test_a_redis_that_refuses(refused: Callable[..., str], locked: EmbeddedRedis) -> None:
    assert "refused the login of user 'default'" in refused()
    wrong = refused(TRTQ_REDIS_URL=locked.url.replace("//", "//gpu:secret@"))
    assert "refused the login of user 'gpu'" in wrong
    assert "secret" not in wrong
    with http_server() as port:
        said = refused(TRTQ_REDIS_URL=f"rediss://127.0.0.1:{port}/0")
    assert "cannot be trusted" in said


def test_the_process_ends_so(folder: Path, locked: EmbeddedRedis) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "producer.cli", "worker", "--models", str(folder)],
        cwd=ROOT,
        env={**os.environ, "TRTQ_REDIS_URL": locked.url},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == EXIT_CONFIG
    assert ended.stderr.startswith(b"trtq worker: Redis at ")
    assert ended.stderr.count(b"\n") == 1


def test_an_option_that_does_not_exist_is_an_error_of_usage() -> None:
    assert CliRunner().invoke(app, ["worker", "--model", "x"]).exit_code == 2
