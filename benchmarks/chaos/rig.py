"""One fault's own Redis, workers and clients, all ended by process id."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import redis

from benchmarks.chaos.model import NAME, write_model
from benchmarks.chaos.proxy import Proxy
from benchmarks.processes import BenchmarkError, Driver, Service
from producer import status
from producer.connection import connect
from producer.embedded import EmbeddedRedis
from producer.inbox import QueueState
from producer.keys import GROUP
from producer.link import Link
from workers.inbox import WorkerInbox

CLIENTS = 4
WORKERS = 2
#: 4 clients at this rate: 240 tasks/s.
PER_S = 60.0
DEADLINE_S = 25.0
_READY_S = 60.0
_EXIT_S = 20.0


class Rig:
    """Redis, 2 supervised workers and 4 clients. A context manager; `env` goes to the workers."""

    def __init__(
        self,
        folder: Path,
        *,
        appendonly: bool = False,
        through_proxy: bool = False,
        env: Mapping[str, str] | None = None,
        client_env: Mapping[str, str] | None = None,
        server: EmbeddedRedis | None = None,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.server = server or EmbeddedRedis(folder=folder / "redis", appendonly=appendonly)
        self._through_proxy = through_proxy
        self._env = {"TRTQ_LEASE_MS": "1500", "TRTQ_DRAIN_GRACE_S": "10", **(env or {})}
        self._client_env = dict(client_env or {})
        self._model = dict(model or {})
        self._stack = ExitStack()
        self._ours: list[psutil.Process] = []
        self.proxy: Proxy | None = None
        self.supervisors: list[Service] = []
        self.clients: list[Driver] = []

    def __enter__(self) -> Rig:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        self._stack.callback(self.server.close)
        if self.server.pid is None:
            self.server.start()
        self.url = self.server.url
        if self._through_proxy:
            self.proxy = self._stack.enter_context(Proxy(self.server.port))
            self.url = f"redis://127.0.0.1:{self.proxy.port}/0"
        self.raw: redis.Redis = connect(self.server.url)
        self._stack.callback(self.raw.close)
        self.fsync_always()
        self.inbox = WorkerInbox(Link(self.raw), NAME)
        write_model(self.folder / "models", **self._model)
        for number in range(WORKERS):
            self.start_supervisor(f"w{number}")
        # All start at once; the clients need the published model only for their first submit.
        for number in range(CLIENTS):
            self.clients.append(self._client(number))
        self.wait_for(self._ready, _READY_S)

    def _ready(self) -> bool:
        for one in self.supervisors:
            one.check()
        return self.inbox.look().workers >= WORKERS

    def fsync_always(self) -> None:
        """Redis answers only what is on its disk, where it keeps anything there."""
        give_up_s = time.monotonic() + 10
        while True:
            try:
                self.raw.config_set("appendfsync", "always")
                return
            except redis.exceptions.RedisError:
                # The connection was to a server that was killed, or this one still loads.
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.02)

    def start_supervisor(self, name: str) -> Service:
        """One more supervisor of one worker."""
        command = [sys.executable, "-m", "benchmarks.chaos.supervisor", name, self.url]
        command += [str(self.folder / "models"), str(self.folder)]
        service = Service(name, command, self.folder, self._env)
        service.start()
        self._ours.append(psutil.Process(service.process.pid))
        self.supervisors.append(service)
        return service

    def _client(self, number: int) -> Driver:
        env = {"CHAOS_URL": self.url, "CHAOS_SEED": str(number + 1), **self._client_env}
        command = [sys.executable, "-m", "benchmarks.chaos.client"]
        driver = Driver(f"client{number}", command, self.folder, env)
        self._stack.enter_context(driver)
        return driver

    def children(self, supervisor: Service) -> list[psutil.Process]:
        """The Celery workers of one supervisor."""
        try:
            found = psutil.Process(supervisor.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._ours += [child for child in found if child not in self._ours]
        return found

    def busy(self, seconds: float) -> psutil.Process | None:
        """A worker that holds tasks now; None if none did for `seconds`."""
        give_up_s = time.monotonic() + seconds
        while time.monotonic() < give_up_s:
            for one in self.supervisors:
                if self._holds(one.name):
                    return next(iter(self.children(one)), None)
            time.sleep(0.002)
        return None

    def kill_all(self) -> int:
        """SIGKILL to all workers while tasks are claimed; returns how many there were."""
        self.wait_for(lambda: self.look().claimed, 10.0)
        victims = [child for one in self.supervisors for child in self.children(one)]
        for child in victims:
            child.kill()
        return len(victims)

    def _holds(self, name: str) -> bool:
        for stream in self.inbox.keys.streams:
            pending = self.raw.xpending(stream, GROUP) if self.raw.exists(stream) else {}
            for one in pending.get("consumers") or ():
                if one["name"].startswith(f"{name}-".encode()):
                    return True
        return False

    def wait_for(self, condition: Callable[[], object], seconds: float) -> None:
        """Waits for `condition`; raises BenchmarkError after `seconds`."""
        give_up_s = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > give_up_s:
                raise BenchmarkError(f"not within {seconds} s: {condition}\n{self.log_tails()}")
            time.sleep(0.05)

    def log_tails(self) -> str:
        """The end of every worker's log."""
        return "\n".join(f"--- {one.name}\n{one.log_tail()}" for one in self.supervisors)

    def load(self, seconds: float, first: dict[str, Any] | None = None, **options: Any) -> None:
        """Orders the load, the first client's with `first` besides; returns at once."""
        common = {"seconds": seconds, "per_s": PER_S, "deadline_s": DEADLINE_S, **options}
        for number, driver in enumerate(self.clients):
            driver.order("load", **common, **(first or {} if number == 0 else {}))

    def loaded(self, seconds: float) -> list[dict[str, Any]]:
        """What became of the load, once every ticket has ended or is overdue."""
        for driver in self.clients:
            driver.answer(seconds + 60)
        for driver in self.clients:
            driver.order("wait", seconds=DEADLINE_S + 10)
        for driver in self.clients:
            driver.answer(DEADLINE_S + 30)
        # A second answer to a task may still be under way.
        self.settle(5.0)
        for driver in self.clients:
            driver.order("finish")
        return [driver.answer(30) for driver in self.clients]

    def settle(self, seconds: float) -> None:
        """Waits until nothing is queued or held, for at most `seconds`."""
        give_up_s = time.monotonic() + seconds
        while time.monotonic() < give_up_s:
            state = self.look()
            if not state.claimed and not state.high + state.normal + state.low:
                break
            time.sleep(0.1)
        time.sleep(0.6)

    def look(self) -> QueueState:
        """The queue now; asked again if the connection was one to a Redis that was killed."""
        try:
            return self.inbox.look()
        except redis.exceptions.ConnectionError:
            return self.inbox.look()

    def counters(self) -> dict[str, int]:
        """Sums of what the live workers count."""
        names = ("tasks", "reclaimed", "released", "dropped", "poisoned", "failed")
        reports = status.look(self.raw).workers
        return {name: sum(report[name] for report in reports) for name in names}

    def turn_counts(self) -> dict[str, int]:
        """Sums over all turns of all workers, also of those that have ended: from their logs."""
        found = {"reclaimed": 0, "released": 0}
        for log in self.folder.glob("*.log"):
            for name in found:
                counts = re.findall(rf"'{name}': (\d+)", log.read_text(errors="replace"))
                found[name] += sum(map(int, counts))
        return found

    def stop_workers(self) -> list[int]:
        """SIGTERM to every supervisor; their exit codes, -9 for one that had to be killed."""
        for one in self.supervisors:
            self.children(one)
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGTERM)
        give_up_s = time.monotonic() + _EXIT_S
        codes = []
        for one in self.supervisors:
            try:
                codes.append(one.process.wait(max(0.1, give_up_s - time.monotonic())))
            except Exception:  # noqa: BLE001 - subprocess.TimeoutExpired: judged as its code
                one.process.kill()
                codes.append(one.process.wait(5))
        return codes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for one in self.supervisors:
            self.children(one)
        for process in self._ours:
            try:
                # psutil compares the start time: an id that was given anew is not killed.
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for one in self.supervisors:
            one.stop()
        self._stack.close()
        shutil.rmtree(self.folder / "redis", ignore_errors=True)
