"""Models that share a worker: when a turn on one ends because another one waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from producer import Client
from producer.spec import TensorSpec
from tests.support import models as onnx_models
from tests.support.fake_engine import FakeEngine
from tests.support.processes import until
from workers import runtime as runtime_module
from workers.engines.base import Array
from workers.models import load_models
from workers.runtime import Runtime
from workers.settings import WorkerSettings

X = (TensorSpec(name="x", dtype="uint8", shape=(1,)),)
Y = (TensorSpec(name="y", dtype="uint8", shape=(1,)),)
#: Only its own rules end a turn within a test.
FOR_EVER_MS = 3_600_000
#: More than the least a turn takes, less than what it may take with more in its queue.
BETWEEN_MS = 50.0


class Scene:
    """A runtime with a batch of one row and one slot; each batch moves the clock by `batch_ms`."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.batch_ms = 0.0
        self.others_wait = False

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.ms += self.batch_ms
        return {"y": inputs["x"]}


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def served(
    redis_url: str,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    scene: Scene,
) -> Iterator[Callable[..., Runtime]]:
    """Starts a runtime in this process with the models named."""
    opened: list[Runtime] = []

    def make(*names: str) -> Runtime:
        for name in names:
            onnx_models.write_config(tmp_path, name, max_batch=1, max_delay_ms=0)
        monkeypatch.setattr(
            runtime_module, "make_engine", lambda config, **_: FakeEngine(scene.run, X, Y)
        )
        settings = WorkerSettings(
            redis_url=redis_url,
            models=str(tmp_path),
            lease_ms=FOR_EVER_MS,
            linger_ms=FOR_EVER_MS,
            turn_budget_s=FOR_EVER_MS / 1000,
        )
        runtime = Runtime(
            settings,
            "t",
            load_models([tmp_path]),
            lambda reason: None,
            lambda: scene.others_wait,
            lambda: scene.ms,
        )
        opened.append(runtime)
        runtime.start()
        return runtime

    yield make
    for runtime in opened:
        runtime.close()


def turn(runtime: Runtime, model: str, timeout_s: float = 20) -> dict[str, object]:
    """One turn in a thread of its own; fails if it does not end."""
    found: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: found.append(runtime.turn(model, "test")), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        runtime.request_stop()
        thread.join(timeout_s)
        pytest.fail("the turn did not end while another model waited")
    return found[0]


def submit(client: Client, model: str, count: int, runtime: Runtime) -> list[object]:
    inbox = next(served.inbox for served in runtime.models if served.name == model)
    tickets = [client.submit(model, np.array([[1]], np.uint8)) for _ in range(count)]
    until(lambda: inbox.look().rows == count)
    return list(tickets)


def test_a_turn_that_has_caught_up_leaves_to_another_model(
    served: Callable[..., Runtime], redis_url: str, scene: Scene
) -> None:
    runtime = served("a", "b")
    scene.batch_ms, scene.others_wait = BETWEEN_MS, True
    with Client(redis_url) as client:
        submit(client, "a", 1, runtime)
        assert turn(runtime, "a")["tasks"] == 1


def test_a_turn_with_more_in_its_queue_goes_on(
    served: Callable[..., Runtime], redis_url: str, scene: Scene
) -> None:
    runtime = served("a", "b")
    scene.batch_ms, scene.others_wait = BETWEEN_MS / 7, True
    with Client(redis_url) as client:
        # Claims take two each: the fourth finds that the queue is empty.
        submit(client, "a", 7, runtime)
        assert turn(runtime, "a")["tasks"] == 7


def test_a_turn_with_more_in_its_queue_leaves_in_the_end(
    served: Callable[..., Runtime], redis_url: str, scene: Scene
) -> None:
    runtime = served("a", "b")
    scene.batch_ms, scene.others_wait = 2 * BETWEEN_MS, True
    with Client(redis_url) as client:
        submit(client, "a", 20, runtime)
        tasks = turn(runtime, "a")["tasks"]
        assert isinstance(tasks, int)
        assert 2 <= tasks < 20


@pytest.mark.parametrize(("names", "most_ms"), [(("a",), 100), (("a", "b"), 10)])
def test_a_turn_looks_for_other_models_while_it_waits(
    served: Callable[..., Runtime],
    scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    most_ms: int,
) -> None:
    runtime = served(*names)
    inbox, waits_ms = runtime.models[0].inbox, list[int]()
    wait = inbox.wait

    def waited(consumer: str, count: int, block_ms: int) -> object:
        waits_ms.append(block_ms)
        if len(waits_ms) == 3:
            scene.ms, scene.others_wait = BETWEEN_MS, True
        return wait(consumer, count, block_ms)

    monkeypatch.setattr(inbox, "wait", waited)
    turn(runtime, "a")
    assert waits_ms == [most_ms] * 3
