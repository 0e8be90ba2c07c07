"""`trtq worker`: one Celery worker process per device, started, watched and restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

from producer import keys
from producer.errors import ConfigError
from workers.devices import CPU, WorkerDevice
from workers.logs import say
from workers.settings import EXIT_CONFIG, SUPERVISOR_FD, worker_settings

_EXIT_FAILED = 1
_FIRST_BACKOFF_S = 1.0
_MOST_BACKOFF_S = 30.0
_STEADY_S = 60.0
_POLL_S = 0.1
#: What a warm stop may take beyond the drain grace: Celery's own steps, freeing the models.
_STOP_MARGIN_S = 10.0
#: How long a killed child may take to be gone; one stuck in the kernel is left to it.
_KILL_S = 5.0


class Plan(NamedTuple):
    """One child: its node name's first part, its command, and what its environment adds.

    `cores`: the CPU cores that it is bound to; empty leaves it those of the supervisor.
    """

    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    cores: frozenset[int] = frozenset()


class Child(Protocol):
    """What the supervisor asks of a process; subprocess.Popen is one."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal, if it still runs."""


def make_plans(
    devices: Sequence[WorkerDevice],
    *,
    redis_url: str | None,
    models: Sequence[Path],
    bulk_roots: Sequence[Path] = (),
    name: str = "",
    infer_threads: int = 8,
    loglevel: str = "info",
    affinity: bool = True,
) -> list[Plan]:
    """One child per device, and one for `trtq.infer` unless `infer_threads` is 0.

    `redis_url` goes to the children through their environment, which other users cannot see, and
    holds all that connecting needs; None leaves them the environment of this process. `affinity`
    binds each to the CPU cores near its device, where they are known. Raises ConfigError for a
    folder that does not exist or a name that cannot be a node's.
    """
    for option, folders in (("--models", models), ("--bulk-root", bulk_roots)):
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"{option} {str(folder)!r} is no folder; create it first")
    if infer_threads < 0:
        raise ConfigError(f"--infer-threads {infer_threads}: use 0 or more")
    prefix = f"{keys.check_name(name)}-" if name else ""
    env = {"TRTQ_MODELS": _joined(models), "TRTQ_BULK_ROOTS": _joined(bulk_roots)}
    if redis_url is not None:
        names = ("URL_FILE", "PASSWORD_FILE", "CA", "CERT", "KEY")
        env |= {f"TRTQ_REDIS_{name}": "" for name in names} | {"TRTQ_REDIS_URL": redis_url}
    plans = []
    for device in devices:
        # The child sees one GPU only, so no library of it can touch another.
        own = {**env, "TRTQ_DEVICE": device.device, **device.cuda_env}
        node = prefix + device.node
        cores = device.cores if affinity else frozenset()
        plans.append(Plan(node, _command(node, loglevel, 1), own, cores))
    if infer_threads:
        node = f"{prefix}infer"
        command = (*_command(node, loglevel, infer_threads), "-Q", keys.INFER_QUEUE)
        plans.append(Plan(node, command, {**env, "TRTQ_DEVICE": CPU.device}))
    return plans


def _joined(folders: Sequence[Path]) -> str:
    return os.pathsep.join(str(folder.resolve()) for folder in folders)


def _command(node: str, loglevel: str, concurrency: int) -> tuple[str, ...]:
    # fmt: off
    return (
        sys.executable, "-m", "celery", "-A", "workers.app", "worker", "-n", f"{node}@%h",
        "-P", "threads", "-c", str(concurrency), "--without-gossip", "--without-mingle", "-E",
        "--loglevel", loglevel,
    )
    # fmt: on


def spawn(plan: Plan, alive_fd: int | None = None) -> Child:
    """Starts the child in a session of its own: a Ctrl-C reaches the supervisor alone.

    `alive_fd`: the read end of a pipe that ends with the supervisor; the child stops by itself
    then (see `workers.process.watch_supervisor`).
    """
    env = {**os.environ, **plan.env}
    if alive_fd is not None:
        env[SUPERVISOR_FD] = str(alive_fd)
    with _bound_to(plan):
        return subprocess.Popen(
            plan.command,
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if alive_fd is None else (alive_fd,),
        )


@contextmanager
def _bound_to(plan: Plan) -> Iterator[None]:
    """Binds the calling thread to the plan's cores: a child started meanwhile inherits that.

    So the child is bound before its first instruction, with all threads that it will have.
    """
    if not plan.cores:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, plan.cores)
    except OSError as failure:
        # The cores were taken away since, or a sandbox forbids it: slower, but it works.
        cores = ",".join(map(str, sorted(plan.cores)))
        say(f"trtq worker: {plan.name} is not bound to cores {cores}: {failure}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


@dataclass
class _Post:
    """One plan and the child that fills it now, or when the next one is due."""

    plan: Plan
    child: Child | None = None
    started_s: float = 0.0
    backoff_s: float = _FIRST_BACKOFF_S
    due_s: float | None = 0.0


class Supervisor:
    """Keeps one child per plan alive until it is asked to stop.

    A child that fails is started again after 1, 2, 4 ... 30 seconds (from 1 again once it ran
    for a minute); one that ends with 78 (wrong configuration) ends everything with 78. What has
    not ended `stop_s` seconds after a warm stop is killed.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        spawn: Callable[[Plan], Child] = spawn,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        report: Callable[[str], None] = say,
        stop_s: float = 40.0,
    ) -> None:
        self._posts = [_Post(plan) for plan in plans]
        self._stop_s = stop_s
        self._kill_at_s: float | None = None
        self._leave_at_s: float | None = None
        self._spawn = spawn
        self._clock = clock
        self._sleep = sleep
        self._report = report
        self._requests = 0
        self._heeded = 0
        self._exit_code = 0

    def request_stop(self) -> None:
        """The first call stops warmly, the second kills. Safe in a signal handler."""
        self._requests += 1

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for, or a child refused its configuration."""
        return self._requests > 0

    def run(self) -> int:
        """Supervises until all children have ended; returns the exit code.

        0: every child ended with 0; 78: a child refused its configuration; else 1, also when
        children had to be killed.
        """
        try:
            while True:
                self._heed_requests()
                for post in self._posts:
                    self._attend(post)
                if all(post.child is None and post.due_s is None for post in self._posts):
                    return self._exit_code
                if self._stop_is_over():
                    return self._exit_code or _EXIT_FAILED
                self._sleep(_POLL_S)
        finally:
            self._signal(signal.SIGKILL)

    def _attend(self, post: _Post) -> None:
        now_s = self._clock()
        if post.child is None:
            if post.due_s is not None and now_s >= post.due_s:
                post.child, post.started_s, post.due_s = self._spawn(post.plan), now_s, None
            return
        code = post.child.poll()
        if code is None:
            return
        post.child = None
        name = post.plan.name
        if code == EXIT_CONFIG:
            self._exit_code = EXIT_CONFIG
            self._report(f"trtq worker: {name} cannot run with this configuration; stopping")
            self._requests = max(1, self._requests)
        elif self._requests or code == 0:
            # 0 without our asking: an operator's `celery control shutdown`, to be respected.
            # Ended by our own SIGTERM: it had not begun to work yet.
            if code not in (0, -signal.SIGTERM):
                self._exit_code = self._exit_code or _EXIT_FAILED
                self._report(f"trtq worker: {name} ended with {code} while stopping")
        else:
            if now_s - post.started_s >= _STEADY_S:
                post.backoff_s = _FIRST_BACKOFF_S
            post.due_s = now_s + post.backoff_s
            self._report(
                f"trtq worker: {name} ended with {code}; starting it again in {post.backoff_s:g} s"
            )
            post.backoff_s = min(_MOST_BACKOFF_S, post.backoff_s * 2)

    def _heed_requests(self) -> None:
        if self._requests > self._heeded:
            self._heeded = self._requests
            if self._requests == 1:
                self._signal(signal.SIGTERM)
                self._kill_at_s = self._clock() + self._stop_s
            else:
                self._kill()
        if self._requests:
            for post in self._posts:
                post.due_s = None

    def _stop_is_over(self) -> bool:
        """Kills what outlived the stop's deadline; True once even that has had its time."""
        now_s = self._clock()
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._report(
                f"trtq worker: {self._running()} did not stop within {self._stop_s:g} s; killing"
            )
            self._exit_code = self._exit_code or _EXIT_FAILED
            self._kill()
        if self._leave_at_s is None or now_s < self._leave_at_s:
            return False
        self._report(f"trtq worker: {self._running()} cannot be killed; leaving")
        return True

    def _kill(self) -> None:
        self._kill_at_s = None
        self._leave_at_s = self._clock() + _KILL_S
        self._signal(signal.SIGKILL)

    def _running(self) -> str:
        return ", ".join(post.plan.name for post in self._posts if post.child is not None)

    def _signal(self, number: int) -> None:
        for post in self._posts:
            if post.child is not None:
                post.child.send_signal(number)


def launch(plans: Sequence[Plan]) -> int:
    """Supervises `plans` until SIGTERM or SIGINT; returns the exit code. Main thread only.

    The children end with this process, however it ends. A warm stop may take TRTQ_DRAIN_GRACE_S
    and 10 s; after it both signals are ignored, as the process is to end. Raises ConfigError
    outside the main thread and for a wrong setting.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("the supervisor needs the main thread: it handles signals")
    stop_s = worker_settings().drain_grace_s + _STOP_MARGIN_S
    # Nobody writes: the kernel closes the write end with this process, and readers see the end.
    alive_fd, held_fd = os.pipe()
    try:
        return _supervise(Supervisor(plans, spawn=partial(spawn, alive_fd=alive_fd), stop_s=stop_s))
    finally:
        os.close(alive_fd)
        os.close(held_fd)


def _supervise(supervisor: Supervisor) -> int:
    def on_signal(number: int, frame: FrameType | None) -> None:
        supervisor.request_stop()

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        return supervisor.run()
    finally:
        for number, handler in before.items():
            # Another one must not take the place of the exit code.
            signal.signal(number, signal.SIG_IGN if supervisor.stopping else handler)
