"""What others wrote into Redis: one bad entry never hides the good ones."""

from __future__ import annotations

import json
import time

import pytest
import redis
from typer.testing import CliRunner

from producer import Client, keys
from producer.catalog import Catalog
from producer.cli import app
from producer.errors import ConfigError, InvalidInput, UnknownModel
from producer.exporter import QueueCollector
from producer.spec import ModelSpec
from producer.status import look
from tests.support.specs import SPEC

GOOD = SPEC.model_dump_json()
BAD_SPECS = {
    b"\xff\xfe": GOOD,
    b"": GOOD,
    "a b": GOOD,
    "other": GOOD,
    "none": "{}",
    "deep": "[" * 100_000,
    "dtype": GOOD.replace('"uint8"', '"object"'),
    "negative": GOOD.replace("[1]", "[-1]"),
    "huge": GOOD.replace('"max_batch":4', '"max_batch":' + "9" * 4000),
    "binary": b"\x00\xff",
}
REPORT = {"name": "w.1", "node": "cpu@host", "models": ["m"], "pid": 7, "tasks": 5, "batches": 2}
BAD_REPORTS = [
    b"\xff",
    "no json",
    "[]",
    "7",
    "[" * 100_000,
    "{}",
    json.dumps({**REPORT, "models": 5}),
    json.dumps({**REPORT, "models": [5]}),
    json.dumps({**REPORT, "tasks": 10**400}),
    '{"name": "w", "batches": NaN}',
    json.dumps({**REPORT, "pid": "x"}),
    json.dumps({**REPORT, "host": "x" * 10_000}),
]


@pytest.fixture
def spoiled(connection: redis.Redis) -> redis.Redis:
    connection.hset(keys.MODELS, "m", GOOD)
    for field, value in BAD_SPECS.items():
        connection.hset(keys.MODELS, field, value)
    connection.set(keys.worker("good"), json.dumps({**REPORT, "host": "[/red]\x1b[2J"}))
    for number, report in enumerate(BAD_REPORTS):
        connection.set(keys.worker(f"bad{number}"), report)
    connection.rpush(keys.worker("list"), "x")
    connection.set(keys.model_keys("none").bells, "no sorted set")
    return connection


def test_the_catalog_leaves_bad_specs_out(
    spoiled: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog(spoiled, 0.0, time.monotonic)
    assert catalog.all() == [SPEC]
    assert len(caplog.messages) == len(BAD_SPECS)
    assert catalog.spec("m") == SPEC
    for name in ("other", "none", "deep", "dtype", "negative", "huge", "binary"):
        with pytest.raises(ConfigError, match=name):
            catalog.spec(name)
    with pytest.raises(UnknownModel, match=r"published models: .*m.*none"):
        catalog.spec("unknown")
    for bad in ("a b", "", "x" * 1_000_000, ["m"], None):
        with pytest.raises(InvalidInput) as refused:
            catalog.spec(bad)  # type: ignore[arg-type]
        assert len(refused.value.message) < 1000


def test_an_unknown_model_does_not_list_thousands(connection: redis.Redis) -> None:
    connection.hset(keys.MODELS, mapping={f"m{i:05}": GOOD for i in range(10_000)})
    with pytest.raises(UnknownModel, match="and 9950 more") as refused:
        Catalog(connection, 0.0, time.monotonic).spec("unknown")
    assert len(refused.value.message) < 1000


def test_status_and_metrics_leave_bad_entries_out(spoiled: redis.Redis) -> None:
    state = look(spoiled)
    assert "m" in state.queues
    assert [worker["name"] for worker in state.workers] == ["w.1"]
    # Four entries are no queue: three names, and the one whose key is of another type.
    assert len(state.unreadable) == 4 + len(BAD_REPORTS)
    metrics = {metric.name: metric for metric in QueueCollector(spoiled).collect()}
    assert metrics["trtq_redis_up"].samples[0].value == 1.0
    assert [s.labels["model"] for s in metrics["trtq_queue_max_rows"].samples] == ["m"]


def test_commands_show_the_good_and_name_the_bad(spoiled: redis.Redis, redis_url: str) -> None:
    runner = CliRunner(env={"TRTQ_REDIS_URL": redis_url, "COLUMNS": "200"})
    models = runner.invoke(app, ["models", "--json"])
    assert models.exit_code == 0, models.output
    assert [ModelSpec.model_validate(spec) for spec in json.loads(models.stdout)] == [SPEC]
    assert models.stderr.count("left out: ") == len(BAD_SPECS)
    assert runner.invoke(app, ["models"]).exit_code == 0
    status = runner.invoke(app, ["status"])
    assert status.exit_code == 0, status.output
    assert "cpu@host" in status.stdout
    assert "[/red]" in status.stdout
    assert "\x1b" not in status.stdout
    assert "trtq:worker:bad3" in status.stdout
    document = json.loads(runner.invoke(app, ["status", "--json"]).stdout)
    assert len(document["unreadable"]) == 4 + len(BAD_REPORTS)


def test_times_that_are_none_are_invalid_input(connection: redis.Redis, redis_url: str) -> None:
    connection.hset(keys.MODELS, "m", GOOD)
    with Client(redis_url) as client:
        for bad in (float("inf"), float("nan"), -1, "5", [5], True, 10**400):
            for name in ("deadline", "timeout"):
                with pytest.raises(InvalidInput, match=name):
                    client.submit("m", [1], **{name: bad})
        with pytest.raises(InvalidInput, match="priority"):
            client.submit("m", [1], priority=["x" * 10_000])  # type: ignore[arg-type]
        for model in (["m"], 5, None):
            with pytest.raises(InvalidInput, match="model name"):
                client.submit(model, [1])  # type: ignore[arg-type]
        ticket = client.submit("m", [1], deadline=1e308, timeout=1e308)
        assert ticket.cancel()
