"""`trtq doctor` on a real worker: each test provokes what the rule is about."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from typer.testing import CliRunner, Result

from producer import Client, keys
from producer.bulk import run_bulk
from producer.cli import app
from producer.doctor.load import Load, default_in_flight, random_inputs
from producer.embedded import EmbeddedRedis, free_port
from producer.errors import InvalidInput
from producer.link import Link
from producer.spec import ModelSpec, TensorSpec
from producer.ticket import Ticket
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker, until
from workers.inbox import WorkerInbox

Doctor = Callable[..., Result]
X = [{"name": "x", "dtype": "float32", "shape": [256]}]
Y = [{"name": "y", "dtype": "float32", "shape": [256]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    # A batch takes long against everything around it, also on a busy machine.
    onnx_models.slow_model(made / "slow.onnx", work=150)
    onnx_models.write_config(made, "slow", max_batch=32, threads=1)
    onnx_models.identity_model(made / "hooked.onnx", 256)
    hook = {"function": "tests.support.hooks:slow_preprocess", "inputs": X}
    onnx_models.write_config(made, "hooked", max_batch=32, preprocess=hook)
    pause = {"function": "tests.support.hooks:pausing_outputs", "outputs": Y}
    long = {"path": "hooked.onnx", "postprocess": pause}
    onnx_models.write_config(made, "wide", **long, max_batch=1024)
    onnx_models.write_config(made, "patient", **long, max_batch=256, slots=2, max_delay_ms=5000)
    onnx_models.dynamic_model(made / "shapes.onnx")
    onnx_models.write_config(made, "shapes", max_batch=64)
    # Of a row of 256 KiB one number is looked at.
    onnx_models.first_column_model(made / "columns.onnx", 65_536)
    onnx_models.write_config(made, "columns", max_batch=64)
    # Indices 0 and 1 are sent; 1 is beyond the table.
    onnx_models.row_failing_model(made / "failing.onnx", size=1)
    onnx_models.write_config(made, "failing", max_batch=8)
    return made


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module", autouse=True)
def worker(redis_url: str, folder: Path, port: int) -> Iterator[WorkerHandle]:
    handle = start_worker(
        redis_url,
        folder,
        metrics_port=str(port),
        hook_modules="tests.support.hooks",
        bulk_roots=str(folder),
    )
    yield handle
    assert handle.stop() == 0


@pytest.fixture
def doctor(redis_url: str) -> Doctor:
    runner = CliRunner(env={"TRTQ_REDIS_URL": redis_url})
    return lambda *args: runner.invoke(app, ["doctor", *map(str, args)])


def diagnosis(shown: Result, model: str) -> dict[str, Any]:
    """What was found about one model, and that the exit code agrees."""
    document = json.loads(shown.stdout)
    found: dict[str, Any] = document["models"][model]
    assert shown.exit_code == (0 if document["healthy"] else 1), shown.output
    return found


def rules(found: dict[str, Any]) -> list[str]:
    return [finding["rule"] for finding in found["findings"]]


def test_an_idle_worker_is_healthy(doctor: Doctor, port: int) -> None:
    shown = doctor("--seconds", 0.5, "--metrics", f"127.0.0.1:{port}")
    assert shown.exit_code == 0, shown.output
    assert "slow: nothing ran" in shown.stdout


def test_full_batches_are_healthy_and_the_pages_are_found(doctor: Doctor, port: int) -> None:
    shown = doctor("--model", "slow", "--run", "--seconds", 2, "--json")
    found = diagnosis(shown, "slow")
    assert json.loads(shown.stdout)["pages"] == [f"http://127.0.0.1:{port}/metrics"]
    assert not {"clients", "small_batches", "hooks", "max_batch_above_load"} & set(rules(found))
    assert found["measures"]["batch_fill_share"] > 0.5
    assert found["measures"]["client_cpu_cores"] > 0
    assert found["measures"]["padding_share"] == 0
    stages = found["stages_ms"]
    assert list(stages) == ["queue_wait", "hold", "gather", "run", "scatter", "reply"]
    assert stages["run"] == max(stages[name] for name in ("gather", "run", "scatter"))


def test_a_client_with_one_task_in_flight_is_the_bottleneck(doctor: Doctor) -> None:
    # Rows of `shapes` cost the worker next to nothing: it waits for the client.
    shown = doctor("--model", "shapes", "--run", "--in-flight", 1, "--seconds", 1)
    assert shown.exit_code == 1, shown.output
    assert "bottleneck [clients]: workers are idle" in shown.stdout
    assert "next: if clients wait for answers" in shown.stdout
    assert "queue_wait" in shown.stdout


def test_a_slow_hook_is_the_bottleneck(doctor: Doctor) -> None:
    found = diagnosis(doctor("--model", "hooked", "--run", "--seconds", 1.5, "--json"), "hooked")
    assert found["bottleneck"] == "hooks"
    assert found["stages_ms"]["preprocess"] > found["stages_ms"]["run"]


def test_max_batch_far_above_the_load(doctor: Doctor) -> None:
    shown = doctor("--model", "wide", "--run", "--in-flight", 64, "--seconds", 2, "--json")
    assert "max_batch_above_load" in rules(diagnosis(shown, "wide"))


@contextmanager
def steady_load(redis_url: str, model: str, inputs: Any, pause_s: float) -> Iterator[None]:
    """One task each `pause_s`, whether others are answered or not."""
    stop = threading.Event()
    with Client(redis_url) as client:
        client.submit(model, inputs).result(timeout=30)

        def submit() -> None:
            while not stop.wait(pause_s):
                client.submit(model, inputs)

        thread = threading.Thread(target=submit)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(10)


def test_a_huge_max_delay_holds_tasks_while_a_slot_is_free(doctor: Doctor, redis_url: str) -> None:
    with steady_load(redis_url, "patient", np.zeros(256, np.float32), 0.002):
        found = diagnosis(doctor("--model", "patient", "--seconds", 2, "--json"), "patient")
    assert "max_delay" in rules(found), found
    assert found["measures"]["max_delay_ms"] == 5000


def test_more_than_the_worker_can_do(doctor: Doctor) -> None:
    shown = doctor("--model", "slow", "--run", "--in-flight", 2500, "--seconds", 2, "--json")
    found = diagnosis(shown, "slow")
    assert "saturated" in rules(found), found
    assert "clients" not in rules(found)


def test_tasks_that_fail(doctor: Doctor) -> None:
    shown = doctor("--model", "failing", "--run", "--seconds", 1, "--json")
    assert diagnosis(shown, "failing")["bottleneck"] == "tasks_fail"
    assert "engine_failed" in shown.stderr


@contextmanager
def own_load(redis_url: str, model: str, inputs: list[Any]) -> Iterator[None]:
    """`inputs` again and again, all of them in flight at once."""
    stop = threading.Event()
    answered = threading.Event()
    with Client(redis_url) as client:

        def again(place: int) -> None:
            def on_done(ticket: Ticket) -> None:
                answered.set()
                if not stop.is_set():
                    again(place)

            client.submit(model, inputs[place]).add_done_callback(on_done)

        for place in range(len(inputs)):
            again(place)
        assert answered.wait(20)
        try:
            yield
        finally:
            stop.set()


def test_many_shapes_make_small_batches(doctor: Doctor, redis_url: str) -> None:
    rows = [np.zeros((1, 16 + place % 40), np.float32) for place in range(1200)]
    with own_load(redis_url, "shapes", rows):
        found = diagnosis(doctor("--model", "shapes", "--seconds", 1.5, "--json"), "shapes")
    assert "small_batches" in rules(found), found
    assert found["measures"]["client_cpu_cores"] is None


def test_batches_of_very_different_sizes(doctor: Doctor, redis_url: str) -> None:
    # A tenth of a second a batch: busy on any machine, and long enough for 50 batches.
    stop = threading.Event()
    with Client(redis_url) as client:

        def one_after_the_other() -> None:
            for rows in itertools.cycle([1] * 7 + [64]):
                if stop.is_set():
                    return
                client.submit("wide", np.zeros((rows, 256), np.float32)).result(timeout=30)

        thread = threading.Thread(target=one_after_the_other)
        thread.start()
        try:
            found = diagnosis(doctor("--model", "wide", "--seconds", 8, "--json"), "wide")
        finally:
            stop.set()
            thread.join(30)
    assert "batch_sizes_vary" in rules(found), found


def test_a_model_that_reads_more_than_it_computes(
    doctor: Doctor, redis_url: str, folder: Path
) -> None:
    inputs = folder / "columns.npy"
    np.save(inputs, np.zeros((1500, 65_536), np.float32))
    stop = threading.Event()

    def jobs() -> None:
        with Client(redis_url) as client:
            for number in itertools.count():
                if stop.is_set():
                    return
                run_bulk(client, "columns", inputs, folder / f"columns-{number}.npy")

    thread = threading.Thread(target=jobs)
    thread.start()
    try:
        found = diagnosis(doctor("--model", "columns", "--seconds", 2, "--json"), "columns")
    finally:
        stop.set()
        thread.join(60)
    assert "gather" in rules(found), found


def test_redis_near_its_limit(doctor: Doctor, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as connection:
        used: Any = connection.info("memory")["used_memory"]
        connection.config_set("maxmemory", int(used * 1.1))
        try:
            found = diagnosis(doctor("--model", "slow", "--seconds", 0.5, "--json"), "slow")
        finally:
            connection.config_set("maxmemory", 0)
    assert found["bottleneck"] == "redis_memory"


def test_a_queue_without_a_worker(tmp_path: Path) -> None:
    spec = ModelSpec(name="m", inputs=(), outputs=(), max_batch=4, max_rows_per_task=4)
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url, protocol=2) as connection:
        connection.hset(keys.MODELS, "m", spec.model_dump_json())
        WorkerInbox(Link(connection), "m").add(spec, 1, "c", 0, [(1, b"task")])
        runner = CliRunner(env={"TRTQ_REDIS_URL": server.url})
        shown = runner.invoke(app, ["doctor", "--seconds", "0.5"])
    assert shown.exit_code == 1
    assert "[no_worker]: 1 tasks wait and no live worker" in shown.stdout


def test_a_worker_without_a_metrics_port(
    doctor: Doctor, redis_url: str, folder: Path, tmp_path: Path
) -> None:
    onnx_models.write_config(tmp_path, "quiet", path=str(folder / "hooked.onnx"))
    other = start_worker(redis_url, tmp_path, name="quiet")
    try:
        shown = doctor("--model", "quiet", "--seconds", 0.5)
        assert "quiet: its workers' metrics were not read" in shown.stdout
        assert shown.exit_code == 0
    finally:
        other.stop()


def test_more_slots_than_cores(tmp_path: Path) -> None:
    onnx_models.slow_model(tmp_path / "slow.onnx", width=512, work=100)
    onnx_models.write_config(tmp_path, "slow", max_batch=32, threads=1, slots=4)
    with EmbeddedRedis() as server:
        worker = start_worker(server.url, tmp_path, metrics_port=str(free_port()))
        try:
            core = min(os.sched_getaffinity(0))
            for thread in Path(f"/proc/{worker.process.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})
            runner = CliRunner(env={"TRTQ_REDIS_URL": server.url})
            args = ["doctor", "--model", "slow", "--run", "--seconds", "2", "--json"]
            found = diagnosis(runner.invoke(app, args), "slow")
        finally:
            worker.stop()
    assert "slots_starve" in rules(found), found


def test_what_cannot_be_asked(doctor: Doctor, redis_url: str, port: int) -> None:
    for args, code, text in [
        (("--run",), 2, "--model"),
        (("--model", "nobody", "--seconds", 0.5), 2, "nobody"),
        (("--metrics", "ftp://x"), 2, "http://host:port/metrics"),
        (("--metrics", f"127.0.0.1:{free_port()}"), 1, "does not answer"),
        (("--metrics", f"127.0.0.1:{port}/healthz"), 1, "no metrics page"),
        (("--model", "slow", "--run", "--rows", 33), 2, "1 to 32 rows"),
    ]:
        shown = doctor(*args)
        assert (shown.exit_code, text in shown.output) == (code, True), (args, shown.output)


def test_help_states_the_exit_codes(doctor: Doctor) -> None:
    text = " ".join(doctor("--help").stdout.split())
    assert "Exit code 0: healthy" in text
    assert "1: at least one finding" in text


def test_without_prometheus_client_the_extra_is_named(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not installed')\n")
    done = subprocess.run(
        [sys.executable, "-m", "producer.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "missing_extra" in done.stderr
    assert "trtq[metrics]" in done.stderr


SPEC = ModelSpec(
    name="m",
    inputs=(
        TensorSpec(name="image", dtype="uint8", shape=(None, 3)),
        TensorSpec(name="ids", dtype="int64", shape=()),
        TensorSpec(name="mask", dtype="bool", shape=(2,)),
        TensorSpec(name="x", dtype="float16", shape=(4,)),
    ),
    outputs=(),
    max_batch=64,
    max_rows_per_task=8,
)


def test_random_inputs_are_valid() -> None:
    made = random_inputs(SPEC, 5, 7, np.random.default_rng(0))
    assert {name: (array.dtype.name, array.shape) for name, array in made.items()} == {
        "image": ("uint8", (5, 7, 3)),
        "ids": ("int64", (5,)),
        "mask": ("bool", (5, 2)),
        "x": ("float16", (5, 4)),
    }
    assert made["ids"].max() <= 1
    assert 0 <= made["x"].min() < made["x"].max() <= 1


def test_the_window_is_bounded() -> None:
    assert default_in_flight(SPEC, 3, 2, 100) == 768
    assert default_in_flight(SPEC, 3, 2, 1 << 20) == 64
    assert default_in_flight(SPEC, 3, 2, 1 << 40) == 1
    assert default_in_flight(SPEC, 16, 100, 1) == 4096


def test_load_is_bounded_in_time_and_leaves_nothing_behind(redis_url: str) -> None:
    with Client(redis_url) as client:
        spec = client.spec("slow")
        load = Load(client, spec, rows=1, in_flight=4, most_s=0.2)
        load.start()
        load.wait_running(20)
        until(lambda: not load.running)
        load.close()
        load.check()
        assert load.tasks >= 4
        assert until(lambda: WorkerInbox(Link(client._redis), "slow").look().rows == 0)
        with pytest.raises(InvalidInput, match="--rows"):
            Load(client, spec, rows=99, in_flight=1, most_s=1).start()


def test_load_tells_what_ended_it(redis_url: str) -> None:
    client = Client(redis_url)
    with client:
        load = Load(client, client.spec("slow"), rows=1, in_flight=1, most_s=30)
    load.start()
    until(lambda: not load.running)
    with pytest.raises(Exception, match="closed"):
        load.check()
