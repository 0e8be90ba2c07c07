"""The supervisor of worker processes, with children and a clock that the test drives."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from producer.errors import ConfigError, InvalidInput
from tests.support import models as onnx_models
from tests.support.processes import ROOT, children, until
from workers import launch
from workers.devices import CPU, WorkerDevice
from workers.launch import Child, Plan, Supervisor, make_plans
from workers.process import watch_supervisor


class FakeChild:
    """Runs until told to end; `obeys` makes SIGTERM end it with 0, `dies` SIGKILL with -9."""

    dies = True

    def __init__(self, plan: Plan, obeys: bool = True) -> None:
        self.plan = plan
        self.obeys = obeys
        self.code: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)
        if sig == signal.SIGKILL:
            self.code = -9 if self.dies else None
        elif self.obeys and self.code is None:
            self.code = 0


class World:
    """Children by start, and a clock that each sleep moves; `script` acts at a time."""

    def __init__(self, *names: str, obeys: bool = True) -> None:
        self.now_s = 0.0
        self.started: list[tuple[float, FakeChild]] = []
        self.reports: list[str] = []
        self.obeys = obeys
        self.at: list[tuple[float, Callable[[], None]]] = []
        self.supervisor = Supervisor(
            [Plan(name, ("true",), {}) for name in names],
            spawn=self.spawn,
            clock=lambda: self.now_s,
            sleep=self.sleep,
            report=self.reports.append,
            stop_s=20,
        )

    def spawn(self, plan: Plan) -> Child:
        child = FakeChild(plan, self.obeys)
        self.started.append((self.now_s, child))
        return child

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < 1000, "the supervisor never ended"
        while self.at and self.at[0][0] <= self.now_s:
            self.at.pop(0)[1]()

    def end_latest(self, code: int) -> Callable[[], None]:
        def act() -> None:
            self.started[-1][1].code = code

        return act


def test_one_child_per_plan_until_a_stop_that_is_forwarded_once() -> None:
    world = World("gpu0", "gpu1", "infer")
    world.at = [(5, world.supervisor.request_stop)]
    assert world.supervisor.run() == 0
    assert [child.plan.name for _, child in world.started] == ["gpu0", "gpu1", "infer"]
    assert all(child.signals == [signal.SIGTERM] for _, child in world.started)


def test_a_second_stop_kills() -> None:
    world = World("cpu", obeys=False)
    world.at = [(5, world.supervisor.request_stop), (9, world.supervisor.request_stop)]
    assert world.supervisor.run() == 1
    assert world.started[0][1].signals == [signal.SIGTERM, signal.SIGKILL]
    assert world.now_s >= 9


def test_a_warm_stop_that_takes_too_long_kills_what_is_left() -> None:
    world = World("quick", "slow", obeys=False)

    def stop() -> None:
        world.supervisor.request_stop()
        world.started[0][1].code = 0

    world.at = [(5, stop)]
    assert world.supervisor.run() == 1
    assert world.now_s == pytest.approx(25, abs=0.5)
    assert world.started[1][1].signals == [signal.SIGTERM, signal.SIGKILL]
    assert "slow did not stop within 20 s" in world.reports[0]
    assert "quick" not in world.reports[0]


def test_a_child_that_cannot_be_killed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeChild, "dies", False)
    world = World("stuck", obeys=False)
    world.at = [(5, world.supervisor.request_stop)]
    assert world.supervisor.run() == 1
    assert world.now_s == pytest.approx(30, abs=0.5)
    assert "cannot be killed" in world.reports[-1]


def test_the_stop_deadline_follows_the_drain_grace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[float] = []

    class Recorded(Supervisor):
        def __init__(self, plans: list[Plan], *, stop_s: float, **_: object) -> None:
            made.append(stop_s)
            super().__init__(plans)

    monkeypatch.setattr(launch, "Supervisor", Recorded)
    monkeypatch.setenv("TRTQ_DRAIN_GRACE_S", "100")
    assert launch.launch([]) == 0
    assert made == [110]
    monkeypatch.setenv("TRTQ_DRAIN_GRACE_S", "soon")
    with pytest.raises(ConfigError, match="TRTQ_DRAIN_GRACE_S='soon'"):
        launch.launch([])


def test_failing_children_are_restarted_ever_later() -> None:
    world = World("cpu")
    lives_s = iter([0, 0, 0, 0, 0, 0, 0, 60, 0])

    def spawn(plan: Plan) -> Child:
        child = world.spawn(plan)
        life_s = next(lives_s, None)
        end = world.supervisor.request_stop if life_s is None else world.end_latest(70)
        world.at = [(world.now_s + (life_s or 0), end)]
        return child

    world.supervisor._spawn = spawn
    assert world.supervisor.run() == 0
    starts = [when for when, _ in world.started]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert gaps == pytest.approx([1, 2, 4, 8, 16, 30, 30, 61, 2], abs=0.5)


def test_a_wrong_configuration_stops_all_with_78() -> None:
    world = World("gpu0", "gpu1")
    world.at = [(3, world.end_latest(78))]
    assert world.supervisor.run() == 78
    assert len(world.started) == 2
    assert world.started[0][1].signals == [signal.SIGTERM]
    assert "configuration" in world.reports[0]


def test_a_stop_while_a_restart_is_due_starts_nothing() -> None:
    world = World("cpu")
    world.at = [(1, world.end_latest(-9)), (1.5, world.supervisor.request_stop)]
    assert world.supervisor.run() == 0
    assert len(world.started) == 1


def test_a_child_shut_down_by_an_operator_stays_down() -> None:
    world = World("cpu")
    world.at = [(2, world.end_latest(0))]
    assert world.supervisor.run() == 0
    assert len(world.started) == 1


def test_a_failure_while_stopping_is_the_exit_code() -> None:
    world = World("cpu", obeys=False)
    world.at = [(1, world.supervisor.request_stop), (2, world.end_latest(70))]
    assert world.supervisor.run() == 1
    assert "70" in world.reports[0]


def test_a_child_that_had_not_begun_when_stopped_is_no_failure() -> None:
    world = World("cpu", obeys=False)
    world.at = [(1, world.supervisor.request_stop), (2, world.end_latest(-15))]
    assert world.supervisor.run() == 0


def test_plans_of_two_gpus(tmp_path: Path) -> None:
    near = frozenset({2, 3})
    plans = make_plans(
        [
            WorkerDevice("0", "gpu0", {"CUDA_VISIBLE_DEVICES": "GPU-a"}, near),
            WorkerDevice("1", "gpu1", {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        ],
        redis_url="redis://h/0",
        models=[tmp_path, tmp_path],
        bulk_roots=[tmp_path],
        name="left",
    )
    assert [plan.name for plan in plans] == ["left-gpu0", "left-gpu1", "left-infer"]
    assert plans[1].env["TRTQ_DEVICE"] == "1"
    assert [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in plans] == ["GPU-a", "GPU-b", None]
    assert [plan.cores for plan in plans] == [near, frozenset(), frozenset()]
    assert plans[0].env["TRTQ_MODELS"] == f"{tmp_path}{os.pathsep}{tmp_path}"
    assert plans[0].env["TRTQ_BULK_ROOTS"] == str(tmp_path)
    assert plans[2].env["TRTQ_DEVICE"] == "cpu"
    assert plans[2].command[-2:] == ("-Q", "trtq.infer")
    assert "left-gpu0@%h" in plans[0].command
    # The URL may hold a password: it must not be in a command line, which all users can read.
    assert not any("redis://" in part for plan in plans for part in plan.command)


def test_plans_without_affinity(tmp_path: Path) -> None:
    device = WorkerDevice("0", "gpu0", {}, frozenset({1}))
    plans = make_plans([device], redis_url="r", models=[tmp_path], affinity=False)
    assert {plan.cores for plan in plans} == {frozenset()}


def test_a_child_starts_even_if_it_cannot_be_bound(capfd: pytest.CaptureFixture[str]) -> None:
    allowed = os.sched_getaffinity(0)
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    child = launch.spawn(Plan("gpu0", (sys.executable, "-c", code), {}, frozenset({1 << 12})))
    assert until(lambda: child.poll() is not None)
    assert child.poll() == 0
    output, errors = capfd.readouterr()
    assert output.strip() == str(sorted(allowed))
    assert "gpu0 is not bound to cores 4096" in errors
    assert os.sched_getaffinity(0) == allowed


def test_no_infer_child_and_wrong_options(tmp_path: Path) -> None:
    plans = make_plans([CPU], redis_url="r", models=[tmp_path], infer_threads=0)
    assert [plan.name for plan in plans] == ["cpu"]
    with pytest.raises(ConfigError, match="--models"):
        make_plans([CPU], redis_url="r", models=[tmp_path / "none"])
    with pytest.raises(ConfigError, match="--infer-threads"):
        make_plans([CPU], redis_url="r", models=[tmp_path], infer_threads=-1)
    with pytest.raises(InvalidInput):
        make_plans([CPU], redis_url="r", models=[tmp_path], name="a b")


def test_signals_reach_a_real_child(tmp_path: Path) -> None:
    script = """
import sys
from workers.launch import Plan, launch
child = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0));"
child += "open('ready', 'w').close(); time.sleep(60)"
sys.exit(launch([Plan("cpu", (sys.executable, "-c", child), {"X": "1"})]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    try:
        until((tmp_path / "ready").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)


def test_a_signal_after_the_stop_does_not_replace_the_exit_code(tmp_path: Path) -> None:
    script = """
import sys
from workers.launch import Plan, launch
child = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3));"
child += "open('ready', 'w').close(); time.sleep(60)"
code = launch([Plan("cpu", (sys.executable, "-c", child), {})])
open("stopped", "w").close()
sys.stdin.read()
sys.exit(code)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE)
    with process:
        try:
            until((tmp_path / "ready").exists)
            process.send_signal(signal.SIGTERM)
            until((tmp_path / "stopped").exists)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 1


def test_the_end_of_the_pipe_is_the_supervisors_death() -> None:
    alive_fd, held_fd = os.pipe()
    sent: list[int] = []
    termed, overdue = threading.Event(), threading.Event()
    naps: list[float] = []

    def send(number: int) -> None:
        sent.append(number)
        termed.set()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        assert overdue.wait(20)

    try:
        thread = watch_supervisor(alive_fd, 45, send, sleep)
        os.write(held_fd, b"no end")
        assert not termed.is_set()
        os.close(held_fd)
        assert termed.wait(20)
        assert sent == [signal.SIGTERM]
        overdue.set()
        thread.join(20)
        assert sent == [signal.SIGTERM, signal.SIGKILL]
        assert naps == [45]
    finally:
        os.close(alive_fd)


def running(pid: int) -> bool:
    """False for a zombie too: its parent may be a container's first process that reaps none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_workers_end_with_a_killed_supervisor(redis_url: str, tmp_path: Path) -> None:
    onnx_models.checksum_model(tmp_path / "checksum.onnx", 16)
    onnx_models.write_config(tmp_path, "checksum", max_batch=64)
    log = tmp_path / "log"
    with log.open("wb") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "producer.cli", "worker", "--models", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "TRTQ_REDIS_URL": redis_url},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    pids: list[int] = []
    try:
        until(lambda: log.read_text(errors="replace").count(" ready.") == 2, 60)
        pids = children(supervisor.pid)
        assert len(pids) == 2
        supervisor.kill()
        supervisor.wait(10)
        until(lambda: not any(map(running, pids)))
        text = log.read_text(errors="replace")
        assert text.count("the supervisor has died") == 2
        assert "killing this process" not in text
    finally:
        supervisor.kill()
        supervisor.wait(10)
        for pid in filter(running, pids):
            os.kill(pid, signal.SIGKILL)


def test_launch_needs_no_gpu_library() -> None:
    assert "pynvml" not in vars(launch)
