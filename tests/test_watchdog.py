"""Runs that do not end: who is answered, who is handed back, and what is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from producer import Client, keys
from producer.entries import Entry
from producer.errors import BatchTimeout, ConfigError, DeviceLost, EngineFailed
from producer.link import Link
from producer.spec import ModelSpec, TensorSpec
from producer.task import InferenceTask, Tensor
from tests.support import models as onnx_models
from tests.support.fake_engine import FakeEngine
from tests.support.processes import until
from workers import runtime as runtime_module
from workers.attempts import Attempt, Attempts
from workers.batcher import Held
from workers.engines.base import Array
from workers.executor import Executor
from workers.feed import Feed
from workers.files import RowFiles
from workers.health import liveness
from workers.inbox import WorkerInbox
from workers.incidents import Incidents
from workers.metrics import Counters
from workers.models import ModelConfig, load_models
from workers.runner import BatchRunner
from workers.runtime import Runtime
from workers.settings import WorkerSettings
from workers.stages import Stages
from workers.watchdog import FreezeGuard, Watchdog

X = (TensorSpec(name="x", dtype="uint8", shape=(1,)),)
Y = (TensorSpec(name="y", dtype="uint8", shape=(1,)),)
SPEC = ModelSpec(name="m", inputs=X, outputs=Y, max_batch=4, max_rows_per_task=4)
KEY = (("uint8", (1,)),)
GOOD, BAD, HANGS = 1, 66, 77
NEVER = FreezeGuard(None)


def held(number: int, value: int = GOOD) -> Held:
    data = np.array([[value]], np.uint8).tobytes()
    task = InferenceTask(f"c-{number}", 1, (Tensor("x", "uint8", (1, 1), data),))
    return Held(Entry(1, b"%d-1" % number, b"", 1), task, KEY, 0.0, float("inf"))


def incidents() -> Incidents:
    return Incidents("m", Counters())


class Clock:
    """Stands still unless it is moved."""

    ms = 0.0

    def __call__(self) -> float:
        return self.ms


class Watched:
    """A model of which a test says what runs; records what was given up."""

    def __init__(self, clock: Clock, timeout_ms: float | None = 10_000.0) -> None:
        self.name = "m"
        self.batch_timeout_ms = timeout_ms
        self.attempts = Attempts(clock)
        self.given_up: list[tuple[list[Held], bool]] = []

    def give_up(self, hung: Sequence[Attempt], *, alone: bool) -> None:
        self.given_up += [(attempt.tasks, alone) for attempt in hung]


class Slots:
    """Threads that stand for slots: each calls what a test hands it, and stays."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.threads: list[threading.Thread] = []

    def run(self, first: Callable[[], Any], then: Callable[[], Any] = lambda: None) -> None:
        done = threading.Event()

        def serve() -> None:
            first()
            done.set()
            self.leave.wait(30)
            then()

        thread = threading.Thread(target=serve)
        self.threads.append(thread)
        thread.start()
        assert done.wait(10)

    def close(self) -> None:
        self.leave.set()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def slots() -> Iterator[Slots]:
    made = Slots()
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def look_for(watchdog: Watchdog, clock: Clock, ms: float) -> None:
    """Lets time pass with a look each second."""
    for _ in range(int(ms // 1000)):
        clock.ms += 1000
        watchdog.look()


def test_a_run_that_is_too_long_is_given_up_once(clock: Clock, slots: Slots) -> None:
    model, reasons = Watched(clock), list[str]()
    watchdog = Watchdog([model], clock, reasons.append, reasons.append, NEVER)
    batch = [held(1), held(2)]
    slots.run(lambda: model.attempts.begin(batch), model.attempts.end)
    look_for(watchdog, clock, 10_000)
    assert (model.given_up, reasons, model.attempts.hung) == ([], [], frozenset())
    look_for(watchdog, clock, 5000)
    assert model.given_up == [(batch, True)]
    assert reasons == ["a run of model 'm' with 2 tasks did not end within 10 s (batch_timeout_s)"]
    assert len(model.attempts.hung) == 1
    slots.close()
    assert (len(model.attempts), model.attempts.hung) == (0, frozenset())


def test_the_time_of_a_task_that_runs_alone_begins_anew(clock: Clock, slots: Slots) -> None:
    model = Watched(clock)
    watchdog = Watchdog([model], clock, lambda reason: None, lambda reason: None, NEVER)
    batch = [held(1), held(2), held(3)]

    def fail_together_after_8_s() -> None:
        model.attempts.begin(batch)
        look_for(watchdog, clock, 8000)
        model.attempts.restart(batch[1:2])

    slots.run(fail_together_after_8_s, model.attempts.end)
    look_for(watchdog, clock, 10_000)
    assert model.given_up == []
    look_for(watchdog, clock, 1000)
    assert model.given_up == [(batch[1:2], True)]


def test_what_hangs_beside_others_did_not_run_alone(clock: Clock, slots: Slots) -> None:
    one, other, patient = Watched(clock), Watched(clock), Watched(clock, None)
    models = [one, other, patient]
    watchdog = Watchdog(models, clock, lambda reason: None, lambda reason: None, NEVER)
    slots.run(lambda: one.attempts.begin([held(1)]), one.attempts.end)
    look_for(watchdog, clock, 6000)
    slots.run(lambda: other.attempts.begin([held(2)]), other.attempts.end)
    slots.run(lambda: patient.attempts.begin([held(3)]), patient.attempts.end)
    look_for(watchdog, clock, 5000)
    assert [len(model.given_up) for model in models] == [1, 0, 0]
    look_for(watchdog, clock, 50_000)
    assert [[alone for _, alone in model.given_up] for model in models] == [[False], [False], []]


def test_a_pause_of_the_whole_process_is_nobodys_fault(clock: Clock, slots: Slots) -> None:
    model = Watched(clock)
    watchdog = Watchdog([model], clock, lambda reason: None, lambda reason: None, NEVER)
    slots.run(lambda: model.attempts.begin([held(1)]), model.attempts.end)
    look_for(watchdog, clock, 5000)
    clock.ms += 3_600_000
    watchdog.look()
    assert model.given_up == []
    look_for(watchdog, clock, 5000)
    assert len(model.given_up) == 1


def test_a_watchdog_that_dies_tells(clock: Clock) -> None:
    class Broken:
        name, batch_timeout_ms = "m", 100.0

        @property
        def attempts(self) -> Attempts:
            raise LookupError("no attempts here")

    deaths: list[str] = []
    broken: Any = Broken()
    watchdog = Watchdog([broken], clock, lambda reason: None, deaths.append, NEVER)
    caught: list[Any] = []
    before, threading.excepthook = threading.excepthook, caught.append
    try:
        watchdog.start()
        until(lambda: not watchdog.alive)
    finally:
        threading.excepthook = before
    assert deaths == ["the watchdog died: LookupError('no attempts here')"]
    assert caught[0].exc_type is LookupError
    watchdog.close()


def blocking_engine(gate: threading.Event, entered: threading.Event) -> FakeEngine:
    def function(inputs: dict[str, Array]) -> dict[str, Array]:
        if (inputs["x"] == BAD).any():
            raise RuntimeError("bad")
        if (inputs["x"] == HANGS).any():
            entered.set()
            assert gate.wait(60)
        return {"y": inputs["x"]}

    return FakeEngine(function, X, Y)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Ends a hang at the test's end."""
    made = threading.Event()
    yield made
    made.set()


def test_each_task_of_a_failed_batch_has_its_own_time(clock: Clock, gate: threading.Event) -> None:
    """The runner says when it runs one by one what failed together."""
    engine = blocking_engine(gate, threading.Event())
    engine.load()
    slot = engine.make_slot()
    slot.activate()
    runner = BatchRunner(engine, SPEC, RowFiles([]), Counters(), Stages(), incidents(), clock)
    batch, attempts = [held(1), held(2, BAD), held(3)], list[list[Held]]()
    settlements = runner.run(slot, batch, attempts.append)
    assert attempts == [batch[:1], batch[1:2], batch[2:]]
    assert len(settlements) == 3


def test_closing_waits_for_no_thread_that_hangs(clock: Clock, gate: threading.Event) -> None:
    entered = threading.Event()
    engine = blocking_engine(gate, entered)
    engine.load()
    feed = Feed(4, 0.0, clock)
    runner = BatchRunner(engine, SPEC, RowFiles([]), Counters(), Stages(), incidents(), clock)
    executor = Executor(
        engine,
        SPEC,
        feed,
        runner,
        2,
        lambda done, urgent: None,
        lambda reason: None,
        incidents(),
        clock,
    )
    executor.start()
    feed.add([held(1, HANGS)])
    assert entered.wait(10)
    clock.ms += 10_000
    assert executor.attempts.abandon(9000)
    assert executor.hung
    # Joined, it would take the hour.
    assert executor.close(timeout_s=3600) is False
    gate.set()
    until(lambda: not executor.hung)
    assert executor.close(timeout_s=20) is True
    assert all(slot.closed for slot in engine.slots)


@pytest.fixture
def served(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., Runtime]]:
    """Makes a started runtime in this process, with the engine given."""
    opened: list[Runtime] = []

    def make(engine: FakeEngine, on_fatal: Callable[[str], None], **config: object) -> Runtime:
        onnx_models.write_config(tmp_path, "fake", **config)
        monkeypatch.setattr(runtime_module, "make_engine", lambda config, **_: engine)
        settings = WorkerSettings(redis_url=redis_url, models=str(tmp_path), lease_ms=300_000)
        runtime = Runtime(settings, "t", load_models([tmp_path]), on_fatal, lambda: False)
        opened.append(runtime)
        runtime.start()
        return runtime

    yield make
    for runtime in opened:
        runtime.close()


def values(*given: int) -> np.ndarray[Any, Any]:
    return np.array(given, np.uint8)[:, np.newaxis]


def deliveries(connection: redis.Redis) -> list[int]:
    stream = keys.model_keys("fake").normal
    pending = connection.xpending_range(stream, keys.GROUP, "-", "+", 100, consumername="released")
    return [found["times_delivered"] for found in pending]


def test_a_batch_that_hangs_is_handed_back_as_suspects_and_then_the_culprit_is_found(
    served: Callable[..., Runtime],
    redis_url: str,
    connection: redis.Redis,
    gate: threading.Event,
) -> None:
    stops: list[Callable[[], None]] = []
    entered = threading.Event()
    engine = blocking_engine(gate, entered)
    config = {"max_batch": 2, "max_delay_ms": 0, "batch_timeout_s": 1}
    first = served(engine, lambda reason: stops[0](), **config)
    stops.append(first.request_stop)
    with Client(redis_url) as client:
        tickets = [client.submit("fake", row) for row in values(GOOD, HANGS, GOOD, GOOD)]
        until(lambda: all(ticket.accepted() for ticket in tickets))
        # It returns although the run hangs: what was claimed is nobody's here any more.
        summary = first.turn("fake", "test")
        assert summary["released"] == 4
        report = liveness(first)
        assert (report.ok, report.facts["hung"]) == (False, ["fake"])
        assert sorted(deliveries(connection)) == [0, 0, 3, 3]
        assert first.close()
        assert first.hung
        assert not engine.closed

        second = served(blocking_engine(gate, entered), lambda reason: stops[1](), **config)
        stops.append(second.request_stop)
        second.turn("fake", "test")
        failure = tickets[1].exception(10)
        assert isinstance(failure, BatchTimeout)
        assert "ran alone for more than 1 s" in str(failure)
        assert WorkerInbox(Link(connection), "fake").look().dead == 1
        assert second.close()

        third = served(blocking_engine(gate, entered), stops.append, **config)
        third.turn("fake", "test")
        assert [ticket.exception(10) is None for ticket in tickets] == [True, False, True, True]
        assert third.close()
        assert not third.hung
    gate.set()


def test_a_hang_in_warm_up_is_a_named_error(clock: Clock, gate: threading.Event) -> None:
    engine = FakeEngine(lambda inputs: {"y": inputs["x"]}, X, Y, gate=gate)
    engine.load()
    runner = BatchRunner(engine, SPEC, RowFiles([]), Counters(), Stages(), incidents(), clock)
    executor = Executor(
        engine,
        SPEC,
        Feed(4, 0.0, clock),
        runner,
        1,
        lambda done, urgent: None,
        lambda reason: None,
        incidents(),
    )
    with pytest.raises(EngineFailed, match="'m' was not warm after 0 s"):
        executor.start(timeout_s=0.05)
    assert executor.close(timeout_s=0.0) is False
    gate.set()
    assert executor.close(timeout_s=20) is True


def test_an_engine_in_use_is_not_freed(
    served: Callable[..., Runtime], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = blocking_engine(gate, threading.Event())
    runtime = served(engine, lambda reason: None, batch_timeout_s=0)
    (model,) = runtime.models
    assert model.batch_timeout_ms is None
    monkeypatch.setattr(model.executor, "close", lambda timeout_s: False)
    assert model.close() is False
    assert not engine.closed
    monkeypatch.undo()
    assert model.close() is True
    assert engine.closed


@pytest.mark.parametrize(
    ("given", "ms"),
    [({}, 60_000), ({"batch_timeout_s": 2}, 2000), ({"batch_timeout_s": 0.5}, 500)]
    + [({"batch_timeout_s": off}, None) for off in (0, None)],
)
def test_the_timeout_of_a_model(given: dict[str, Any], ms: float | None) -> None:
    config = ModelConfig.model_validate({"name": "m", "path": Path("/m.onnx"), **given})
    assert config.batch_timeout_ms == ms


@pytest.mark.parametrize("wrong", ["-1", ".inf", "soon"])
def test_a_wrong_timeout_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "m.yaml").write_text(f"path: m.onnx\nbatch_timeout_s: {wrong}\n")
    with pytest.raises(ConfigError, match="batch_timeout_s"):
        load_models([tmp_path])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_second_slot_that_loses_the_device_later_hands_its_batch_back_too(
    served: Callable[..., Runtime], redis_url: str, connection: redis.Redis
) -> None:
    runtimes: list[Runtime] = []
    both = threading.Event()

    def function(inputs: dict[str, Array]) -> dict[str, Array]:
        if (inputs["x"] == 1).any():
            assert both.wait(20)
            raise DeviceLost("lost")
        if (inputs["x"] == 2).any():
            both.set()
            until(lambda: runtimes[0].models[0].counters.released)
            raise DeviceLost("lost")
        return {"y": inputs["x"]}

    runtime = served(
        FakeEngine(function, X, Y),
        lambda reason: runtimes[0].request_stop(),
        max_batch=1,
        slots=2,
        max_delay_ms=0,
    )
    runtimes.append(runtime)
    with Client(redis_url) as client:
        tickets = [client.submit("fake", row) for row in values(1, 2)]
        until(lambda: all(ticket.accepted() for ticket in tickets))
        assert runtime.turn("fake", "test")["released"] == 2
        assert deliveries(connection) == [0, 0]
        for ticket in tickets:
            ticket.cancel()
