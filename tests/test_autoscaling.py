"""What KEDA reads in Redis and in Prometheus means what configs/kubernetes takes it for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from producer import keys
from producer.acl import Role, User, rights_of
from producer.entries import Settlement
from producer.exporter import QueueCollector
from producer.link import Link
from tests.support.processes import ROOT
from tests.support.specs import SPEC
from workers.inbox import WorkerInbox

MODEL = "digits"


def triggers(folder: str) -> list[dict[str, Any]]:
    """Triggers of the ScaledObject there."""
    file = Path(ROOT / "configs" / "kubernetes" / folder / "scaled-object.yaml")
    documents = yaml.safe_load_all(file.read_text(encoding="utf-8"))
    (scaled,) = (one for one in documents if one["kind"] == "ScaledObject")
    return list(scaled["spec"]["triggers"])


STREAMS = [trigger["metadata"]["stream"] for trigger in triggers("scale-on-length")]


def kedas_reading(connection: redis.Redis) -> list[int]:
    """The value of each trigger: KEDA calls XLEN where no consumer group is named."""
    return [int(connection.execute_command("XLEN", stream)) for stream in STREAMS]


@pytest.fixture
def inbox(connection: redis.Redis) -> WorkerInbox:
    return WorkerInbox(Link(connection), MODEL)


def test_triggers_read_the_streams_by_length() -> None:
    assert tuple(STREAMS) == keys.model_keys(MODEL).streams
    for trigger in triggers("scale-on-length"):
        assert "streamLength" in trigger["metadata"]
        assert not {"consumerGroup", "lagCount", "pendingEntriesCount"} & set(trigger["metadata"])


def test_length_is_what_waits_and_what_is_in_work(
    connection: redis.Redis, inbox: WorkerInbox
) -> None:
    spec = SPEC.model_copy(update={"name": MODEL, "queue_max_rows": 100, "queue_max_bytes": 10_000})
    assert kedas_reading(connection) == [0, 0, 0], "before anything was submitted"
    _, ids = inbox.add(spec, 1, "c", 1, [(1, b"x")] * 10)
    inbox.add(spec, 0, "c", 2, [(1, b"x")] * 3)
    assert kedas_reading(connection) == [3, 10, 0]
    entries = inbox.claim("w", 7).entries
    assert kedas_reading(connection) == [3, 10, 0], "claimed tasks count"
    inbox.settle([Settlement(entry, 1, "c", b"r") for entry in entries])
    assert kedas_reading(connection) == [0, 6, 0], "answered tasks do not"
    waiting = ids[-1]
    assert waiting is not None
    assert inbox.cancel(1, waiting, 1, 1) == 1
    assert kedas_reading(connection) == [0, 5, 0], "cancelled tasks do not"
    inbox.settle([Settlement(entry, 1, "c", b"r") for entry in inbox.claim("w", 7).entries])
    assert kedas_reading(connection) == [0, 0, 0]


def test_lag_is_lost_when_a_waiting_task_is_cancelled(
    connection: redis.Redis, inbox: WorkerInbox
) -> None:
    """Why the triggers do not use it. Servers before 7 have no lag at all."""
    spec = SPEC.model_copy(update={"name": MODEL, "queue_max_rows": 100, "queue_max_bytes": 10_000})
    _, ids = inbox.add(spec, 1, "c", 1, [(1, b"x")] * 4)
    (group,) = connection.xinfo_groups(STREAMS[1])
    if "lag" not in group:
        pytest.skip("this Redis counts no lag")
    assert group["lag"] == 4
    assert ids[2] is not None
    inbox.cancel(1, ids[2], 1, 1)
    (group,) = connection.xinfo_groups(STREAMS[1])
    assert group["lag"] is None
    assert kedas_reading(connection)[1] == 3


def test_the_exporters_user_may_ask_what_keda_asks() -> None:
    rights = rights_of(User("exporter", Role.MONITOR))
    assert {"ping", "xlen"} <= set(rights.commands.split())
    assert "trtq:*" in rights.keys


def test_queries_name_what_the_exporter_exposes(
    connection: redis.Redis, inbox: WorkerInbox
) -> None:
    spec = SPEC.model_copy(update={"name": MODEL})
    connection.hset(keys.MODELS, MODEL, spec.model_dump_json())
    inbox.add(spec, 1, "c", 1, [(1, b"x")] * 4)
    registry = CollectorRegistry()
    registry.register(QueueCollector(connection))
    page = generate_latest(registry).decode()
    exposed = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.labels.get("model") == MODEL
    }
    for trigger in triggers("scale-on-metrics"):
        found = re.fullmatch(r'max\((\w+)\{model="digits"\}\)', trigger["metadata"]["query"])
        assert found, trigger["metadata"]["query"]
        assert found[1] in exposed
        # No answer must not look like no work.
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    assert exposed["trtq_queue_rows"] == 4
