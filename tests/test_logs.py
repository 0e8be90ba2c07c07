"""The log as JSON: of a real worker, its supervisor, and record by record."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer import Client
from producer.errors import EngineFailed
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker, until
from workers.logs import JsonFormatter, logged_with

#: Not records of the log: Celery writes these past it while it stops.
PAST_THE_LOG = ("", "worker: Warm shutdown (MainProcess)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    onnx_models.row_failing_model(made / "failing.onnx")
    onnx_models.write_config(made, "failing", max_batch=8)
    return made


@pytest.fixture
def worker(redis_url: str, folder: Path) -> Iterator[WorkerHandle]:
    handle = start_worker(
        redis_url, folder, wait=False, log_format="json", linger_ms="50", heartbeat_s="0.2"
    )
    until(lambda: any(" ready." in one["message"] for one in records(handle)), 40)
    yield handle
    handle.stop()


def records(handle: WorkerHandle) -> list[dict[str, Any]]:
    """Every complete line; fails where one is no JSON object with the common fields."""
    *lines, _ = handle.text.split("\n")
    found = [json.loads(line) for line in lines if line not in PAST_THE_LOG]
    for one in found:
        assert {"time", "level", "logger", "message", "node", "device"} <= set(one), one
    return found


def test_every_record_of_a_worker_is_json(redis_url: str, worker: WorkerHandle) -> None:
    with Client(redis_url) as client:
        assert client.submit("failing", np.int64(4)).result(timeout=20) == 2
        bad = client.submit("failing", np.int64(99))
        assert isinstance(bad.exception(timeout=20), EngineFailed)

    def turns() -> list[dict[str, Any]]:
        found = [one for one in records(worker) if one["message"].startswith("turn on")]
        return found if sum(one["tasks"] for one in found) == 2 else []

    turn = until(turns)[0]
    assert worker.stop() == 0
    found = records(worker)
    assert {one["device"] for one in found} == {"cpu"}
    (node,) = {one["node"] for one in found}
    assert node.startswith("cpu@")
    assert datetime.fromisoformat(found[0]["time"].replace("Z", "+00:00")).year > 2000
    assert (turn["level"], turn["logger"], turn["model"]) == ("info", "trtq.runtime", "failing")
    assert {"rows", "batches", "mean_batch", "failed", "seconds"} <= set(turn)
    # Celery's own records of the same turn carry the same id.
    by_celery = [one for one in found if one["logger"].startswith("celery.")]
    assert turn["turn_id"] in {one.get("turn_id") for one in by_celery}
    (failed,) = (one for one in found if one.get("event") == "failed")
    assert failed["task_ids"] == [bad.task_id]
    assert (failed["model"], failed["reason"]) == ("failing", "engine_failed")
    raised = [one for one in found if "exception" in one]
    assert all(one["exception"].startswith("Traceback") for one in raised)


def test_the_default_format_stays(redis_url: str, folder: Path) -> None:
    handle = start_worker(redis_url, folder, name="text")
    assert handle.stop() == 0
    assert "[tasks]" in handle.text
    assert "INFO/MainProcess] model 'failing' is warm" in handle.text


def test_refusals_and_the_supervisor_speak_json_too(redis_url: str, tmp_path: Path) -> None:
    handle = start_worker(redis_url, tmp_path, wait=False, log_format="json")
    assert handle.process.wait(40) == 78
    (refusal,) = [json.loads(line) for line in handle.text.splitlines()]
    assert "no model configuration" in refusal["message"]
    process = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "worker", "--models", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TRTQ_REDIS_URL": redis_url, "TRTQ_LOG_FORMAT": "json"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, text = process.communicate(timeout=60)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.returncode == 78
    # Before any process is started: each of them would say it again.
    (line,) = text.splitlines()
    assert json.loads(line)["message"].startswith("trtq worker: no model configuration")


def test_an_unknown_format_is_refused(redis_url: str, folder: Path) -> None:
    handle = start_worker(redis_url, folder, wait=False, log_format="xml")
    assert handle.process.wait(40) == 78
    assert "TRTQ_LOG_FORMAT='xml': Input should be 'text' or 'json'" in handle.text


def formatted(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter({"node": "n", "device": "0"}).format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def record(**fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "x", "levelname": "INFO", "msg": "a\nb", **fields})


def test_fields_of_the_thread_and_of_the_call() -> None:
    with logged_with(model="m", turn_id="t"), logged_with(turn_id="u"):
        found = formatted(record(reason="r", path=Path("/p"), node="liar"))
        others: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: others.append(formatted(record())))
        thread.start()
        thread.join(10)
    assert (found["model"], found["turn_id"], found["reason"]) == ("m", "u", "r")
    assert (found["node"], found["message"], found["path"]) == ("n", "a\nb", "/p")
    assert "model" not in others[0]
    assert "model" not in formatted(record())


def test_ids_of_celery() -> None:
    assert formatted(record(data={"id": "7", "name": "trtq.serve"}))["turn_id"] == "7"
    assert formatted(record(data={"id": "7", "name": "trtq.infer"}))["celery_task_id"] == "7"
    assert "turn_id" not in formatted(record(data=[1]))


def test_a_traceback_is_one_line() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError:
        found = formatted(record(exc_info=sys.exc_info(), stack_info="here"))
    assert found["exception"].endswith("ValueError: no\nway")
    assert found["stack"] == "here"
