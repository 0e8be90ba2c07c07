"""A worker's metrics and probes over real HTTP."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from producer import Client, keys
from producer.embedded import EmbeddedRedis, free_port
from producer.errors import ConfigError, EngineFailed, Unavailable
from producer.spec import TensorSpec
from producer.status import look
from tests.support import models as onnx_models
from tests.support.fake_engine import FakeEngine
from tests.support.http import fetch, probe, scrape, value
from tests.support.processes import WorkerHandle, start_worker, until
from workers import runtime as runtime_module
from workers.collector import WorkerCollector
from workers.endpoint import Endpoint
from workers.gpu import GpuReader
from workers.health import liveness, readiness
from workers.launch import Plan
from workers.models import load_models
from workers.observe import with_ports
from workers.runtime import Runtime
from workers.settings import WorkerSettings

X = (TensorSpec(name="x", dtype="float32", shape=(2,)),)
Y = (TensorSpec(name="y", dtype="float32", shape=(2,)),)
ROWS = np.random.default_rng(1).integers(0, 256, (200, 16), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(made / "checksum.onnx", 16)
    onnx_models.write_config(made, "checksum", max_batch=64)
    onnx_models.row_failing_model(made / "failing.onnx")
    onnx_models.write_config(made, "failing", max_batch=8)
    return made


@pytest.fixture(scope="module")
def url() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module", autouse=True)
def worker(redis_url: str, folder: Path, url: str) -> Iterator[WorkerHandle]:
    handle = start_worker(redis_url, folder, metrics_port=url.rpartition(":")[2])
    yield handle
    handle.stop()
    print(handle.text[-2000:])


def test_metrics_count_what_was_run(redis_url: str, url: str) -> None:
    before = scrape(f"{url}/metrics")
    assert value(before, "trtq_slots", model="checksum") == 1
    with Client(redis_url) as client:
        results = list(client.map("checksum", ROWS))
        bad = client.submit("failing", np.int64(99))
        assert isinstance(bad.exception(timeout=20), EngineFailed)
    assert [int(r) for r in results] == onnx_models.checksum(ROWS).tolist()

    def answered() -> object:
        samples = scrape(f"{url}/metrics")
        done = value(samples, "trtq_tasks_answered_total", model="checksum") == len(ROWS)
        return samples if done else None

    samples = until(answered)
    label = {"model": "checksum"}
    assert value(samples, "trtq_rows_total", **label) == len(ROWS)
    batches = value(samples, "trtq_batches_total", **label)
    assert value(samples, "trtq_batch_rows_count", **label) == batches
    assert value(samples, "trtq_batch_rows_sum", **label) == len(ROWS)
    assert value(samples, "trtq_queue_wait_seconds_count", **label) == len(ROWS)
    for stage in ("hold", "gather", "run", "scatter"):
        name = "trtq_stage_duration_seconds"
        assert value(samples, f"{name}_count", stage=stage, **label) == batches
        assert 0 <= value(samples, f"{name}_sum", stage=stage, **label) < 30
    assert value(samples, "trtq_stage_duration_seconds_count", stage="reply", **label) >= 1
    assert value(samples, "trtq_padded_rows_total", **label) == 0
    assert 0 < value(samples, "trtq_busy_seconds_total", **label) < 30
    assert value(samples, "trtq_max_delay_seconds", **label) == 0.002
    assert value(samples, "trtq_slots_busy", **label) == 0
    assert value(samples, "trtq_held_rows", **label) == 0
    assert value(samples, "trtq_unanswered_rows", **label) == 0
    assert value(samples, "trtq_tasks_failed_total", model="failing", reason="engine_failed") == 1
    assert value(samples, "trtq_worker_healthy", device="cpu") == 1
    assert value(samples, "trtq_worker_ready", device="cpu") == 1
    assert samples["process_resident_memory_bytes", ()] > 1 << 20


def test_histograms_are_cumulative_and_end_with_inf(url: str) -> None:
    samples = scrape(f"{url}/metrics")
    found = [
        (float(dict(labels)["le"]), number)
        for (name, labels), number in samples.items()
        if name == "trtq_batch_rows_bucket" and ("model", "checksum") in labels
    ]
    numbers = [number for _, number in sorted(found)]
    assert sorted(found)[-1][0] == float("inf")
    assert numbers == sorted(numbers)
    assert numbers[-1] == value(samples, "trtq_batch_rows_count", model="checksum")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_finds_nothing_to_say(url: str) -> None:
    _, text = fetch(f"{url}/metrics")
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=text.encode(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr + done.stdout) == (0, b"")


def test_probes_of_a_worker_that_runs(url: str) -> None:
    status, facts = probe(f"{url}/healthz")
    assert (status, facts["ok"], facts["state"]) == (200, True, "running")
    assert all(facts["threads"].values())
    assert {"heartbeat", "slots of checksum", "replies of failing"} <= set(facts["threads"])
    assert facts["heartbeat_age_s"] < 10
    status, facts = probe(f"{url}/readyz")
    assert (status, facts["warm"], facts["redis"]) == (200, True, True)
    assert fetch(f"{url}/else")[0] == 404
    assert fetch(f"{url}/drain")[0] == 404
    assert fetch(f"{url}/metrics", method="POST")[0] == 404
    # A web page opened on the worker's machine cannot stop it.
    assert fetch(f"{url}/drain", method="POST", Origin="http://evil.example")[0] == 403
    assert probe(f"{url}/readyz")[0] == 200


def test_the_port_is_published(redis_url: str, url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as connection:
        assert [one["metrics_url"] for one in look(connection).workers] == [f"{url}/metrics"]


def test_drain_ends_the_worker_as_sigterm_does(
    redis_url: str, url: str, worker: WorkerHandle
) -> None:
    with Client(redis_url) as client:
        ticket = client.submit("checksum", ROWS[0])
        assert fetch(f"{url}/drain", method="POST")[0] == 202
        assert worker.process.wait(20) == 0
        with redis.Redis.from_url(redis_url) as raw:
            waits = raw.xlen(keys.model_keys("checksum").normal) == 1
        # Not run: it waits for the next worker, perhaps handed back by this one.
        assert waits or ticket.exception(timeout=5) is None


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[FakeEngine], tuple[Runtime, Endpoint, EmbeddedRedis]]]:
    """Makes a started runtime in this process, with the engine given, and its port."""
    opened: list[Runtime | Endpoint | EmbeddedRedis] = []

    def make(engine: FakeEngine) -> tuple[Runtime, Endpoint, EmbeddedRedis]:
        server = EmbeddedRedis()
        server.start()
        opened.append(server)
        onnx_models.write_config(tmp_path, "fake")
        monkeypatch.setattr(runtime_module, "make_engine", lambda config, **_: engine)
        settings = WorkerSettings(redis_url=server.url, models=str(tmp_path), heartbeat_s=0.05)
        runtime = Runtime(
            settings, "t", load_models([tmp_path]), lambda reason: None, lambda: False
        )
        endpoint = Endpoint(
            "127.0.0.1",
            0,
            WorkerCollector(lambda: runtime, "cpu", None),
            lambda: liveness(runtime),
            lambda: readiness(runtime),
            runtime.request_stop,
        )
        opened.append(endpoint)
        endpoint.start()
        opened.append(runtime)
        return runtime, endpoint, server

    yield make
    for one in reversed(opened):
        one.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_slot_thread_died_is_not_healthy(
    served: Callable[[FakeEngine], tuple[Runtime, Endpoint, EmbeddedRedis]],
) -> None:
    class Died(BaseException):
        """What no handler expects."""

    dying: list[bool] = []

    def function(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
        if dying:
            raise Died
        return {"y": inputs["x"]}

    engine = FakeEngine(function, X, Y)
    runtime, endpoint, server = served(engine)
    url = f"http://127.0.0.1:{endpoint.port}"
    assert probe(f"{url}/healthz")[1]["state"] == "starting"
    assert probe(f"{url}/readyz")[0] == 503
    runtime.start()
    assert probe(f"{url}/healthz")[0] == 200
    assert probe(f"{url}/readyz")[0] == 200
    dying.append(True)
    with Client(server.url) as client:
        client.submit("fake", np.zeros(2, np.float32))
        (model,) = runtime.models
        entries = until(lambda: model.inbox.enter(runtime.consumer, 8).entries)
        model.feed.add(model.intake.admit(entries, 0).held)
        _, facts = until(lambda: (found := probe(f"{url}/healthz"))[0] == 503 and found, seconds=10)
        assert not facts["threads"]["slots of fake"]
        assert facts["threads"]["heartbeat"]
        assert probe(f"{url}/readyz")[0] == 503
        samples = scrape(f"{url}/metrics")
        assert value(samples, "trtq_worker_healthy", device="cpu") == 0
        assert value(samples, "trtq_worker_ready", device="cpu") == 0


def test_a_worker_without_redis_lives_but_is_not_ready(
    served: Callable[[FakeEngine], tuple[Runtime, Endpoint, EmbeddedRedis]],
) -> None:
    engine = FakeEngine(
        lambda inputs: {"y": inputs["x"]},
        X,
        Y,
    )
    runtime, endpoint, server = served(engine)
    runtime.start()
    url = f"http://127.0.0.1:{endpoint.port}"
    server.close()
    assert probe(f"{url}/healthz")[0] == 200
    status, facts = probe(f"{url}/readyz")
    assert (status, facts["redis"]) == (503, False)
    assert facts["redis_error"]


def test_a_taken_port_is_named(url: str) -> None:
    collector = WorkerCollector(lambda: None, "cpu", None)
    reports = (lambda: liveness(None), lambda: readiness(None))
    first = Endpoint("127.0.0.1", 0, collector, *reports, lambda: None)
    first.start()
    try:
        second = Endpoint("127.0.0.1", first.port, collector, *reports, lambda: None)
        with pytest.raises(Unavailable, match=f"127.0.0.1:{first.port}.*TRTQ_METRICS_PORT"):
            second.start()
        assert probe(f"http://127.0.0.1:{first.port}/readyz")[0] == 200
    finally:
        first.close()


@pytest.mark.parametrize(
    ("listens", "published"),
    [
        ("127.0.0.1", "http://127.0.0.1:9464/metrics"),
        ("0.0.0.0", "http://gpu7:9464/metrics"),
        ("::", "http://gpu7:9464/metrics"),
        ("fd00::7", "http://[fd00::7]:9464/metrics"),
    ],
)
def test_the_published_address_can_be_reached(listens: str, published: str) -> None:
    settings = WorkerSettings(metrics_host=listens, metrics_port=9464)
    assert settings.metrics_url("gpu7") == published


def test_each_process_gets_a_port() -> None:
    plans = [Plan("cpu", (), {}), Plan("infer", (), {"A": "b"})]
    assert [p.env["TRTQ_METRICS_PORT"] for p in with_ports(plans, 9464)] == ["9464", "9465"]
    assert with_ports(plans, 9464)[1].env["A"] == "b"
    assert {p.env["TRTQ_METRICS_PORT"] for p in with_ports(plans, 0)} == {"0"}
    with pytest.raises(ConfigError, match="65535"):
        with_ports(plans, 65535)


def test_gpu_values_that_a_driver_refuses_are_left_out() -> None:
    class Nvml:
        """A driver that tells memory and power, and nothing else."""

        NVML_TEMPERATURE_GPU = 0

        class NVMLError(Exception):
            """As pynvml's."""

        def nvmlInit(self) -> None:  # noqa: N802
            self.open = True

        def nvmlShutdown(self) -> None:  # noqa: N802
            self.open = False

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
            return index

        def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:  # noqa: N802
            return type("Memory", (), {"used": 5, "total": 10})

        def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
            return 250_500

        def __getattr__(self, name: str) -> object:
            def refuse(*_: object) -> None:
                raise self.NVMLError(name)

            return refuse

    nvml = Nvml()
    reader = GpuReader(nvml, "3")
    assert reader.read() is None
    assert reader.start()
    state = reader.read()
    assert state is not None
    assert (state.memory_used_bytes, state.memory_total_bytes, state.power_watts) == (5, 10, 250.5)
    assert state.utilization_ratio is None
    families = {f.name: f for f in WorkerCollector(lambda: None, "3", reader).collect()}
    assert families["trtq_gpu_power_watts"].samples[0].value == 250.5
    assert "trtq_gpu_temperature_celsius" not in families
    reader.close()
    assert not nvml.open
