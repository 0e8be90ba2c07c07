"""Real worker processes for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true value of `condition`; fails the test after `seconds`."""
    give_up_s = time.monotonic() + seconds
    while time.monotonic() < give_up_s:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {condition}")


def children(pid: int) -> list[int]:
    """Processes that the main thread of `pid` has started and not yet waited for."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class WorkerHandle:
    """A running Celery worker process and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def wait_ready(self, seconds: float = 40.0) -> None:
        """Waits for Celery's ready line."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"worker ended with {self.process.returncode}:\n{self.text}")
            return " ready." in self.text

        until(ready, seconds)

    def stop(self, seconds: float = 20.0) -> int:
        """SIGTERM, then the exit code; SIGKILL if it takes too long."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)


def start_worker(
    redis_url: str,
    models: Path,
    *,
    name: str = "cpu",
    queues: str = "",
    concurrency: int = 1,
    pool: str = "threads",
    log: Path | None = None,
    wait: bool = True,
    app: str = "workers.app",
    **env: str,
) -> WorkerHandle:
    """Starts `celery -A workers.app worker`; `env` adds TRTQ_ variables, lower case without it."""
    command = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", f"{name}@%h"]
    command += ["-P", pool, "-c", str(concurrency), "--without-gossip", "--without-mingle"]
    command += ["--loglevel", "info"] + (["-Q", queues] if queues else [])
    log = log or models / f"worker-{name}-{time.monotonic_ns()}.log"
    handle = _start(command, redis_url, models, log, env)
    if wait:
        try:
            handle.wait_ready()
        except BaseException:
            handle.process.kill()
            raise
    return handle


def start_supervised(redis_url: str, models: Path, app: str, **env: str) -> WorkerHandle:
    """Starts the supervisor with one worker of `app`; the handle is the supervisor's."""
    command = [sys.executable, "-m", "tests.support.supervised", app, redis_url, str(models)]
    return _start(command, redis_url, models, models / f"{time.monotonic_ns()}.log", env)


def _start(
    command: list[str], redis_url: str, models: Path, log: Path, env: dict[str, str]
) -> WorkerHandle:
    variables = {f"TRTQ_{key.upper()}": value for key, value in env.items()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "TRTQ_REDIS_URL": redis_url,
                "TRTQ_MODELS": str(models),
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return WorkerHandle(process, log)
