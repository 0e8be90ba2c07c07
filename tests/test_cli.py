"""The command line against a real Redis and a real worker."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
from typer.testing import CliRunner, Result

from producer import Client, keys
from producer.catalog import Catalog
from producer.cli import app
from producer.errors import Cancelled
from tests.support import models as onnx_models
from tests.support.processes import WorkerHandle, start_worker, until

Run = Callable[..., Result]

ROWS = np.random.default_rng(2).integers(0, 256, (100, 16), dtype=np.uint8)
SUMS = onnx_models.checksum(ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(made / "checksum.onnx", 16)
    onnx_models.write_config(made, "checksum", max_batch=64, max_rows_per_task=8)
    onnx_models.two_inputs_model(made / "pair.onnx", 3)
    onnx_models.write_config(made, "pair", max_batch=8)
    onnx_models.row_failing_model(made / "failing.onnx")
    onnx_models.write_config(made, "failing", max_batch=64)
    return made


@pytest.fixture(scope="module", autouse=True)
def worker(redis_url: str, folder: Path) -> Iterator[WorkerHandle]:
    handle = start_worker(redis_url, folder, bulk_roots=str(folder))
    yield handle
    assert handle.stop() == 0


@pytest.fixture
def run(redis_url: str) -> Run:
    runner = CliRunner(env={"TRTQ_REDIS_URL": redis_url, "COLUMNS": "200"})
    return lambda *args, **kwargs: runner.invoke(app, [str(arg) for arg in args], **kwargs)


def test_submit_json_and_files(run: Run, tmp_path: Path) -> None:
    shown = run("submit", "checksum", input=json.dumps(ROWS[0].tolist()))
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout) == SUMS[0]
    np.save(tmp_path / "rows.npy", ROWS[:5])
    written = run("submit", "checksum", tmp_path / "rows.npy", "--output", tmp_path / "sums.npy")
    assert written.exit_code == 0, written.output
    assert np.load(tmp_path / "sums.npy").tolist() == SUMS[:5].tolist()
    assert f"wrote {tmp_path / 'sums.npy'}: " in written.stdout
    assert written.stdout.rstrip().endswith(" (5,)")
    np.savez(tmp_path / "pair.npz", a=np.array([1, 2, 3], "f4"), b=np.array([4, 5, 6], "f4"))
    both = run("submit", "pair", tmp_path / "pair.npz")
    assert json.loads(both.stdout) == {"sum": [5, 7, 9], "product": [4, 10, 18]}


def test_an_archive_holds_outputs_by_the_models_names(run: Run, tmp_path: Path) -> None:
    rows = json.dumps(ROWS[:3].tolist())
    stored = run("submit", "checksum", "--store", "--output", tmp_path / "one.npz", input=rows)
    assert stored.exit_code == 0, stored.output
    task_id = stored.stderr.split()[-1]
    assert run("result", task_id, "--output", tmp_path / "again.npz").exit_code == 0
    for name in ("one.npz", "again.npz"):
        with np.load(tmp_path / name) as found:
            assert found.files == ["sum"]
            assert found["sum"].tolist() == SUMS[:3].tolist()
    assert run("result", task_id, "--output", tmp_path / "again.npy").exit_code == 0
    assert np.load(tmp_path / "again.npy").tolist() == SUMS[:3].tolist()


def test_version(run: Run) -> None:
    shown = run("--version")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("trtq ")
    assert shown.stdout.count("\n") == 1


def test_a_stored_result_can_be_read_later(run: Run) -> None:
    stored = run("submit", "checksum", "--store", input=json.dumps(ROWS[:1].tolist()))
    assert stored.stderr.count("\n") == 1  # no warning: a worker serves the model
    task_id = stored.stderr.split()[-1]
    again = run("result", task_id)
    assert json.loads(again.stdout) == [SUMS[0]]
    assert run("result", "nobody-1").exit_code == 1


@pytest.mark.parametrize(
    ("args", "text", "code"),
    [
        (("submit", "none"), "[1]", "unknown_model"),
        (("submit", "checksum"), "[1, 2]", "wrong_shape"),
        (("submit", "checksum"), "no json", "file_format"),
        (("submit", "checksum", "/none.npy"), "", "file_missing"),
        (("submit", "checksum", "--priority", "urgent"), json.dumps([1] * 16), "invalid_input"),
        (("submit", "checksum", "--output", "a.txt"), "[1]", "invalid_input"),
        (("purge", "none", "--yes"), "", "unknown_model"),
        (("models", "--redis-url", "http://host"), "", "config"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    run: Run, args: tuple[str, ...], text: str, code: str
) -> None:
    refused: Result = run(*args, input=text)
    assert refused.exit_code == 2, refused.output
    assert refused.stderr.startswith(f"error [{code}]: ")
    assert refused.stderr.count("\n") == 1


def test_no_redis_is_exit_1_and_hides_the_password(run: Run) -> None:
    for command in (("status",), ("models",), ("submit", "checksum")):
        url = "redis://user:secret@127.0.0.1:1/0"
        failed = run(*command, "--redis-url", url, input=json.dumps([1] * 16))
        assert failed.exit_code == 1
        assert failed.stderr.splitlines()[1].startswith("error [redis_unavailable]: ")
        assert "secret" not in failed.output


def test_bulk_whole_and_with_failed_rows(run: Run, folder: Path) -> None:
    np.save(folder / "rows.npy", ROWS)
    done = run("bulk", "checksum", folder / "rows.npy", folder / "sums.npy", "--rows-per-task", 8)
    assert done.exit_code == 0, done.output
    assert np.load(folder / "sums.npy").tolist() == SUMS.tolist()
    again = run("bulk", "checksum", folder / "rows.npy", folder / "sums.npy")
    assert again.exit_code == 2
    assert "error [output_mismatch]" in again.stderr
    resumed = run("bulk", "checksum", folder / "rows.npy", folder / "sums.npy", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "already done: all 100 rows" in resumed.stdout
    assert "warning" not in resumed.stderr
    np.save(folder / "index.npy", np.array([1, 2, 99, 3], np.int64))
    some = run("bulk", "failing", folder / "index.npy", folder / "values.npy")
    assert some.exit_code == 3, some.output
    assert "values.npy.errors.jsonl" in some.output
    assert np.isnan(np.load(folder / "values.npy")).tolist() == [False, False, True, False]


def test_models_and_status(run: Run, worker: WorkerHandle) -> None:
    listed = run("models")
    assert listed.exit_code == 0
    assert "checksum" in listed.stdout
    assert {m["name"] for m in json.loads(run("models", "--json").stdout)} == {
        "checksum", "failing", "pair",
    }  # fmt: skip
    state = json.loads(run("status", "--json").stdout)
    assert state["queues"]["checksum"]["workers"] == 1
    assert [w["pid"] for w in state["workers"]] == [worker.process.pid]
    shown = run("status")
    assert shown.exit_code == 0
    head, row = shown.stdout.splitlines()[-2:]
    assert head.split()[:5] == ["worker", "host", "device", "models", "pid"]
    host = socket.gethostname()
    assert row.split()[:3] == [f"cpu@{host}", host, "cpu"]
    assert str(worker.process.pid) in row.split()


def test_purge_tells_the_senders(run: Run, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as raw, Client(redis_url) as client:
        # A published model that no worker serves, so that its tasks wait.
        spec = Catalog(raw, 0, time.monotonic).spec("checksum")
        idle = spec.model_copy(update={"name": "idle"})
        raw.hset(keys.MODELS, "idle", idle.model_dump_json())
        try:
            tickets = [client.submit("idle", row, store=True) for row in ROWS[:20]]
            until(lambda: raw.xlen(keys.model_keys("idle").normal) == 20)
            assert run("purge", "idle", input="n\n").exit_code == 1
            purged = run("purge", "idle", "--yes")
            assert purged.exit_code == 0, purged.output
            assert "20" in purged.stdout
            for ticket in tickets:
                with pytest.raises(Cancelled):
                    ticket.result(20)
            assert raw.xlen(keys.model_keys("idle").normal) == 0
        finally:
            raw.hdel(keys.MODELS, "idle")


def test_a_model_that_nobody_serves_is_named(run: Run, redis_url: str, folder: Path) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as raw:
        spec = Catalog(raw, 0, time.monotonic).spec("checksum")
        idle = spec.model_copy(update={"name": "idle"})
        raw.hset(keys.MODELS, "idle", idle.model_dump_json())
        try:
            np.save(folder / "idle.npy", ROWS)
            single = run("submit", "idle", "--deadline", "0.01", input=json.dumps([1] * 16))
            args = (folder / "idle.npy", folder / "idle-sums.npy", "--deadline", "0.01")
            bulk = run("bulk", "idle", *args)
        finally:
            raw.hdel(keys.MODELS, "idle")
    for shown, code in ((single, 1), (bulk, 3)):
        assert shown.exit_code == code, shown.output
        assert shown.stderr.startswith("warning: no worker serves model 'idle' now")
    assert "error [deadline_exceeded]" in single.stderr


@pytest.mark.parametrize("command", "worker bulk submit result models status purge redis".split())
def test_each_help_shows_an_example(run: Run, command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert f"trtq {command}" in shown.stdout
