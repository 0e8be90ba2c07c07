"""The metrics of the whole stack agree with what was submitted."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from producer.connection import connect
from tests.ops.conftest import WORKERS, Running
from tests.support.http import fetch, probe, scrape, value

pytestmark = pytest.mark.ops


def test_what_runs_is_what_the_compose_file_says(running: Running) -> None:
    assert [service.name for service in running.stack.services] == [
        "redis",
        *WORKERS,
        "exporter",
        "flower",
    ]
    assert {left.name for left in running.stack.left} == {"prometheus", "grafana"}
    assert running.stack.ended() is None


def test_the_exporter_sees_the_workers(running: Running) -> None:
    samples = scrape(running.url("exporter", "/metrics"))
    assert value(samples, "trtq_redis_up") == 1
    assert value(samples, "trtq_workers", device="cpu") == len(WORKERS)
    assert value(samples, "trtq_queue_workers", model="digits") == len(WORKERS)
    assert value(samples, "trtq_queue_rows", model="digits") == 0
    assert value(samples, "trtq_redis_memory_max_bytes") == 2 << 30


def test_the_workers_count_what_was_submitted(running: Running) -> None:
    pages = [scrape(running.url(worker, "/metrics")) for worker in WORKERS]

    def total(name: str, **labels: str) -> float:
        return sum(
            number
            for page in pages
            for (sample, found), number in page.items()
            if sample == name and labels.items() <= dict(found).items()
        )

    assert total("trtq_tasks_answered_total", model="digits") == running.answered + running.expired
    assert total("trtq_rows_total", model="digits") == running.answered
    assert total("trtq_task_events_total", model="digits", event="expired") == running.expired
    reason = {"model": "digits", "reason": "deadline_exceeded"}
    assert total("trtq_tasks_failed_total", **reason) == running.expired
    assert total("trtq_worker_healthy", device="cpu") == len(WORKERS)


@pytest.mark.parametrize("service", [*WORKERS, "exporter"])
def test_metrics_are_well_formed(running: Running, service: str) -> None:
    status, text = fetch(running.url(service, "/metrics"))
    assert status == 200
    assert len(list(text_string_to_metric_families(text))) > 10
    if shutil.which("promtool"):
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=text.encode(),
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stderr + done.stdout) == (0, b"")


@pytest.mark.parametrize("worker", WORKERS)
def test_workers_are_ready(running: Running, worker: str) -> None:
    status, facts = probe(running.url(worker, "/readyz"))
    assert (status, facts["ok"], facts["redis"]) == (200, True, True)


def test_redis_asks_everybody_for_a_login(running: Running) -> None:
    port = running.stack.service("redis").port
    with (
        connect(f"redis://127.0.0.1:{port}/0") as connection,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        connection.ping()


def test_redis_refused_nobody_of_the_stack(running: Running) -> None:
    with redis.Redis.from_url(running.redis_url("admin"), protocol=2) as admin:
        denied = admin.acl_log()
    # Drivers tell Redis their names, which needs CLIENT; `default` is the test without a login.
    assert not [
        entry
        for entry in denied
        if entry["object"] not in ("client", "client|setinfo") and entry["username"] != "default"
    ]
