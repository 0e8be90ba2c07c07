"""Processes of a benchmark: services with a log, clients that take orders, their CPU time."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
_STOP_S = 15.0


class BenchmarkError(Exception):
    """A process of the benchmark failed; the message has the end of its log."""


class Service:
    """A process in a session of its own, its output in `log`. A context manager."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = list(command)
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; an order pipe is open on its standard input and output if it takes orders."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._env, start_new_session=True, **self._pipes(log)
            )

    def _pipes(self, log: Any) -> dict[str, Any]:
        return {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process; raises BenchmarkError before `start`."""
        if self._process is None:
            raise BenchmarkError(f"{self.name} was not started")
        return self._process

    def check(self) -> None:
        """Raises BenchmarkError if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise BenchmarkError(f"{self.name} ended with {code}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The last 2,000 characters of its log."""
        return self.log.read_text(errors="replace")[-2000:]

    def wait_until(self, ready: Callable[[], object], seconds: float = 60.0) -> None:
        """Waits for `ready()` to be true; raises BenchmarkError after `seconds`, or its end."""
        give_up_s = time.monotonic() + seconds
        while not ready():
            self.check()
            if time.monotonic() > give_up_s:
                raise BenchmarkError(f"{self.name} not ready in {seconds} s:\n{self.log_tail()}")
            time.sleep(0.02)

    def cpu_s(self) -> float:
        """CPU seconds (user and system) of the process and its descendants so far."""
        top = psutil.Process(self.process.pid)
        total = 0.0
        for process in (top, *top.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
        return total

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what is left of its session."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class Driver(Service):
    """A client process that obeys orders (see benchmarks.peers.loops.obey)."""

    def _pipes(self, log: Any) -> dict[str, Any]:
        return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        super().start()
        self._rest = b""
        try:
            self.answer(60)
        except BaseException:
            self.stop()
            raise

    def order(self, name: str, **options: Any) -> None:
        """Sends an order; `answer` returns what came of it."""
        pipe = self.process.stdin
        assert pipe is not None
        pipe.write(json.dumps({"order": name, **options}).encode() + b"\n")
        pipe.flush()

    def answer(self, timeout_s: float = 90) -> Any:
        """The answer to the oldest open order; raises BenchmarkError if it failed."""
        pipe = self.process.stdout
        assert pipe is not None
        give_up_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(give_up_s - time.monotonic()):
                    raise BenchmarkError(f"{self.name}: no answer in {timeout_s} s")
                read = os.read(pipe.fileno(), 1 << 16)
                if not read:
                    self.process.wait(_STOP_S)
                    self.check()
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        if "error" in message:
            raise BenchmarkError(f"{self.name}: {message['error']}")
        return message["answer"]

    def ask(self, name: str, **options: Any) -> Any:
        """`order` and `answer`."""
        self.order(name, **options)
        return self.answer()


def make_venv(folder: Path, requirements: Sequence[str]) -> Path:
    """The Python of a virtualenv with `requirements`, made if it is not there yet.

    Raises BenchmarkError with pip's words if they cannot be installed.
    """
    python, marker = folder / "bin" / "python", folder / ".requirements"
    wanted = "\n".join(requirements)
    if python.exists() and marker.exists() and marker.read_text() == wanted:
        return python
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *requirements],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    marker.write_text(wanted)
    return python
