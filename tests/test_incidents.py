"""Whatever happens to a task besides a result: one count with its reason, one line with its id."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from producer import Client, keys
from producer.config import ProducerSettings
from producer.embedded import EmbeddedRedis
from producer.entries import Settlement
from producer.errors import DeviceLost, TrtqError
from producer.link import Link
from producer.spec import TensorSpec
from producer.task import InferenceTask, Reply, RowReference, Tensor
from producer.wire import encode_reply, encode_task
from tests.support import models as onnx_models
from tests.support.fake_engine import FakeEngine
from tests.support.processes import ROOT, until
from workers import runtime as runtime_module
from workers.collector import _counters
from workers.inbox import WorkerInbox
from workers.incidents import IDS_PER_LINE, KINDS, Incidents
from workers.metrics import Counters
from workers.models import load_models
from workers.runtime import Runtime
from workers.settings import WorkerSettings

X = (TensorSpec(name="x", dtype="float32", shape=(2,)),)
Y = (TensorSpec(name="y", dtype="float32", shape=(2,)),)
MODEL = "fake"

Counts = dict[tuple[str, str], int]


def frame_of(task_id: str, value: float = 1.0, dtype: str = "float32", ttl_ms: int = 0) -> bytes:
    data = np.full((1, 2), value, dtype).tobytes()
    return encode_task(InferenceTask(task_id, 1, (Tensor("x", dtype, (1, 2), data),), None, ttl_ms))


class Scene:
    """A started runtime in this process on its own Redis, with an engine that the test steers."""

    def __init__(self, server: EmbeddedRedis, folder: Path, log: pytest.LogCaptureFixture) -> None:
        self.server = server
        self.folder = folder
        self.log = log
        self.gate = threading.Event()
        self.gate.set()
        self.raw = redis.Redis.from_url(server.url, protocol=2)
        self.inbox = WorkerInbox(Link(self.raw), MODEL)
        self.flush = 0
        self.turns: list[threading.Thread] = []
        self.deaths: list[str] = []

    def start(self, **settings: Any) -> None:
        self.engine = FakeEngine(lambda inputs: {"y": inputs["x"]}, X, Y, gate=self.gate)
        onnx_models.write_config(self.folder, MODEL, max_batch=2, max_delay_ms=0)
        self.runtime = Runtime(
            WorkerSettings(
                redis_url=self.server.url,
                bulk_roots=str(self.folder),
                **{"linger_ms": 50, "lease_ms": 60_000, "drain_grace_s": 5, **settings},
            ),
            "w",
            load_models([self.folder]),
            self.deaths.append,
            lambda: False,
        )
        self.runtime.start()
        (self.model,) = self.runtime.models
        self.log.clear()

    def add(self, *frames: bytes, priority: int = 1) -> list[bytes]:
        self.flush += 1
        _, ids = self.inbox.add(
            self.model.spec, priority, "c", self.flush, [(1, frame) for frame in frames]
        )
        return [entry_id for entry_id in ids if entry_id is not None]

    def turn(self) -> None:
        self.runtime.turn(MODEL, "test")

    def turn_aside(self) -> threading.Thread:
        """A turn in a thread of its own."""
        thread = threading.Thread(target=self.turn, daemon=True)
        self.turns.append(thread)
        thread.start()
        return thread

    def hold(self, *frames: bytes) -> list[bytes]:
        """Adds tasks while the slot is kept busy, and waits until they wait behind it."""
        self.gate.clear()
        busy = self.add(frame_of("c-busy1"), frame_of("c-busy2"))
        self.turn_aside()
        until(lambda: self.model.feed.running == 1)
        ids = self.add(*frames)
        until(lambda: self.model.feed.held_rows == len(frames))
        return [*busy, *ids]

    def release(self) -> None:
        """Lets the slot go on, and waits for the turns."""
        self.gate.set()
        for thread in self.turns:
            thread.join(20)
            assert not thread.is_alive()

    def counts(self) -> Counts:
        return {key: n for key, n in self.model.incidents.counts().items() if n}

    def lines(self) -> list[str]:
        return [r.getMessage() for r in self.log.records if r.name == "trtq.incidents"]

    def logged(self) -> list[tuple[str, str, str]]:
        """The (event, reason, task id) that lines name so far."""
        return [
            (r.event, r.reason, name)  # type: ignore[attr-defined]
            for r in list(self.log.records)
            if r.name == "trtq.incidents"
            for name in r.task_ids  # type: ignore[attr-defined]
        ]

    def check(self, *wanted: tuple[str, str, str]) -> None:
        """Exactly these (event, reason, task id) were counted, and each is in one line."""
        counts: Counts = {}
        for event, reason, _ in wanted:
            counts[event, reason] = counts.get((event, reason), 0) + 1
        if wanted:
            # A line follows its count.
            until(lambda: self.counts() == counts and len(self.logged()) >= len(wanted), 10)
        assert self.counts() == counts
        assert sorted(self.logged()) == sorted(wanted)
        for record in (r for r in self.log.records if r.name == "trtq.incidents"):
            assert record.levelno == KINDS[record.event].level  # type: ignore[attr-defined]
        families = {
            (s.labels["event"], s.labels["reason"]): s.value
            for family in _counters([self.model])
            for s in family.samples
            if s.name == "trtq_task_events_total"
        }
        assert {key: value for key, value in families.items() if value} == counts

    def close(self) -> None:
        self.gate.set()
        self.runtime.close()
        self.raw.close()


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Scene]:
    caplog.set_level(logging.INFO, logger="trtq")
    with EmbeddedRedis() as server:
        made = Scene(server, tmp_path, caplog)
        monkeypatch.setattr(runtime_module, "make_engine", lambda config, **_: made.engine)
        yield made
        made.close()


def test_a_good_task_is_no_incident(scene: Scene) -> None:
    scene.start()
    scene.add(frame_of("c-1"))
    scene.turn()
    scene.check()
    assert scene.lines() == []


def test_late_in_the_queue(scene: Scene) -> None:
    scene.start()
    scene.add(frame_of("c-1", ttl_ms=1), frame_of("c-2", ttl_ms=1))
    until(lambda: scene.inbox.look().oldest_age_ms > 1)
    scene.turn()
    scene.check(("expired", "queued", "c-1"), ("expired", "queued", "c-2"))
    assert scene.lines() == ["expired [queued] of model 'fake': c-1, c-2"]
    assert scene.model.counters.expired == 2


def test_late_or_cancelled_behind_a_busy_slot(scene: Scene) -> None:
    scene.start()
    # Three fill what the turn holds. When one is late there is room, and the next claim sees marks.
    late, unwanted, kept = frame_of("c-late", ttl_ms=500), frame_of("c-unwanted"), frame_of("c-ok")
    ids = scene.hold(late, unwanted, kept)
    assert scene.inbox.cancel(1, ids[3], 1, 1) == 0
    until(lambda: scene.counts().get(("cancelled", "held")))
    scene.release()
    scene.check(("expired", "held", "c-late"), ("cancelled", "held", "c-unwanted"))
    counts = scene.model.counters
    assert (counts.failed, counts.expired, counts.cancelled) == (1, 1, 1)


def test_cancelled_when_it_is_claimed(scene: Scene) -> None:
    scene.start()
    (entry_id,) = scene.add(frame_of("c-1"))
    scene.raw.zadd(scene.inbox.keys.cancelled, {b"1:" + entry_id: 1e15})
    scene.turn()
    scene.check(("cancelled", "claimed", "c-1"))


def test_refused_corrupt_and_old_letters(scene: Scene) -> None:
    scene.start(dead_max_tasks=1)
    scene.add(frame_of("c-1", dtype="float64"))
    scene.turn()
    (first,) = scene.add(b"\xc1 garbage")
    scene.turn()
    until(lambda: scene.inbox.look().dead == 1)
    ((letter_id, _),) = scene.raw.xrange(scene.inbox.keys.dead_letters)
    letter = f"letter:{letter_id.decode()}"
    scene.add(frame_of("c-3")[:-4])
    scene.turn()
    name = f"entry:1:{first.decode()}"
    scene.check(
        ("refused", "wrong_dtype", "c-1"),
        ("corrupt", "corrupt_message", name),
        ("corrupt", "corrupt_message", "c-3"),
        ("dead_dropped", "count", letter),
    )
    assert "float64" in scene.lines()[0]
    assert scene.model.counters.failed == 3
    assert scene.model.stages.failures() == {"wrong_dtype": 1, "corrupt_message": 2}


def claimed_by(scene: Scene, frame: bytes, deliveries: int) -> None:
    """As if the last of several workers had died with the task."""
    scene.add(frame)
    (entry,) = scene.inbox.claim("dead-worker", 1).entries
    stream = scene.inbox.keys.normal
    scene.raw.xclaim(
        stream, keys.GROUP, "dead-worker", 0, [entry.entry_id], idle=10**6, retrycount=deliveries
    )


def test_reclaimed_suspect_and_poison(scene: Scene) -> None:
    scene.start(max_deliveries=2)
    claimed_by(scene, frame_of("c-1"), 1)
    scene.turn()
    scene.check(("reclaimed", "lease_expired", "c-1"))
    assert scene.lines() == [
        "reclaimed [lease_expired] of model 'fake': c-1: from dead-worker",
    ]
    scene.log.clear()
    claimed_by(scene, frame_of("c-2"), 2)
    scene.turn()
    claimed_by(scene, frame_of("c-3"), 3)
    scene.turn()
    assert [line.split(": ")[:2] for line in scene.lines()] == [
        ["reclaimed [suspect] of model 'fake'", "c-2"],
        ["reclaimed [suspect] of model 'fake'", "c-3"],
        ["poisoned [deliveries] of model 'fake'", "c-3"],
    ]
    assert "held by dead-worker" in scene.lines()[1]
    assert scene.counts() == {
        ("reclaimed", "lease_expired"): 1,
        ("reclaimed", "suspect"): 2,
        ("poisoned", "deliveries"): 1,
    }
    assert (scene.model.counters.reclaimed, scene.model.counters.poisoned) == (3, 1)


def test_retried_and_failed(scene: Scene) -> None:
    scene.start()

    def function(inputs: dict[str, Any]) -> dict[str, Any]:
        if (inputs["x"] == 13).any():
            raise RuntimeError("thirteen\nFAKE LINE")
        return {"y": inputs["x"]}

    scene.engine.function = function
    scene.add(frame_of("c-good"), frame_of("c-bad", 13))
    scene.turn()
    scene.check(
        ("retried", "engine_failed", "c-good"),
        ("retried", "engine_failed", "c-bad"),
        ("failed", "engine_failed", "c-bad"),
    )
    retried, failed = scene.lines()
    assert "each runs alone" in retried
    assert "thirteen" in failed
    assert "\n" not in retried + failed
    (record,) = [r for r in scene.log.records if getattr(r, "event", "") == "failed"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)
    assert "13." not in retried + failed


def test_rows_of_a_file_that_failed(scene: Scene) -> None:
    scene.start()
    np.save(scene.folder / "in.npy", np.array([[1, 1], [13, 13]], np.float32))
    np.save(scene.folder / "out.npy", np.zeros((2, 2), np.float32))

    def function(inputs: dict[str, Any]) -> dict[str, Any]:
        if (inputs["x"] == 13).any():
            raise RuntimeError("thirteen")
        return {"y": inputs["x"]}

    scene.engine.function = function
    paths = (("x", str(scene.folder / "in.npy")),), (("y", str(scene.folder / "out.npy")),)
    frame = encode_task(InferenceTask("c-1", 2, reference=RowReference(*paths, 0, 2)))
    scene.inbox.add(scene.model.spec, 2, "c", 1, [(2, frame)])
    scene.turn()
    scene.check(("retried", "engine_failed", "c-1"), ("rows_failed", "engine_failed", "c-1"))
    assert "1 of 2 rows, first 1: " in scene.lines()[1]
    assert scene.model.stages.failures() == {"engine_failed": 1}
    assert scene.model.counters.failed == 1


def test_handed_back_by_a_worker_that_stops(scene: Scene) -> None:
    scene.start()
    scene.hold(frame_of("c-1"), frame_of("c-2"))
    scene.runtime.request_stop()
    until(lambda: scene.counts())
    scene.release()
    scene.check(("released", "stopping", "c-1"), ("released", "stopping", "c-2"))
    scene.runtime.close()
    scene.log.clear()
    scene.start()
    scene.turn()
    scene.check(("reclaimed", "handed_back", "c-1"), ("reclaimed", "handed_back", "c-2"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_tasks_of_a_lost_device(scene: Scene) -> None:
    scene.start()

    def function(inputs: dict[str, Any]) -> dict[str, Any]:
        scene.runtime.request_stop()
        raise DeviceLost("it fell off the bus")

    scene.engine.function = function
    scene.add(frame_of("c-1"))
    scene.turn()
    scene.check(("returned", "device_lost", "c-1"), ("released", "stopping", "c-1"))
    assert scene.deaths


def test_taken_over_while_it_was_held(scene: Scene) -> None:
    scene.start(lease_ms=600)
    ids = scene.hold(frame_of("c-1"))
    stream = scene.inbox.keys.normal
    scene.raw.xclaim(stream, keys.GROUP, "other", 0, [ids[2]], justid=True)
    until(lambda: scene.counts())
    scene.release()
    scene.check(("lost", "lease_expired", "c-1"))


def test_answered_by_another_worker_before(scene: Scene) -> None:
    scene.start()
    scene.gate.clear()
    scene.add(frame_of("c-1"))
    scene.turn_aside()
    until(lambda: scene.model.feed.running == 1)
    (entry,) = scene.model.ledger.entries()
    reply = encode_reply(Reply("c-1", error_code="x"))
    assert scene.inbox.settle([Settlement(entry, 1, "c", reply)]).answered == 1
    scene.release()
    scene.check(("dropped", "answered_before", "c-1"))
    assert scene.model.counters.dropped == 1
    assert scene.raw.llen(keys.reply("c")) == 1


def test_answers_that_redis_refuses(scene: Scene) -> None:
    scene.start()
    scene.raw.set(scene.inbox.keys.holders, "no hash")
    scene.add(frame_of("c-1"))
    scene.turn()
    scene.check(("dropped", "redis_refused", "c-1"))
    assert "WRONGTYPE" in scene.lines()[0]


def test_redis_is_away_while_the_worker_stops(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.turn._LINK_PATIENCE_MS", 100.0)
    monkeypatch.setattr("workers.replies._BACKOFF_S", (0.01,))
    scene.start()
    scene.gate.clear()
    stop = threading.Event()

    def stopping() -> bool:
        if stop.is_set():
            scene.server.kill()
        return stop.is_set()

    scene.add(frame_of("c-busy1"), frame_of("c-busy2"))
    turn = threading.Thread(
        target=lambda: scene.model.turn(stopping, lambda: False, shared=False), daemon=True
    )
    scene.turns.append(turn)
    turn.start()
    until(lambda: scene.model.feed.running == 1)
    scene.add(frame_of("c-1"))
    until(lambda: scene.model.feed.held_rows == 1)
    stop.set()
    until(lambda: scene.counts())
    scene.release()
    scene.runtime.close()
    scene.check(
        ("abandoned", "redis_unavailable", "c-1"),
        ("reply_retried", "redis_unavailable", "c-busy1"),
        ("reply_retried", "redis_unavailable", "c-busy2"),
        ("dropped", "redis_unavailable", "c-busy1"),
        ("dropped", "redis_unavailable", "c-busy2"),
    )


def test_a_batch_that_outlives_the_drain_grace(scene: Scene) -> None:
    scene.start(drain_grace_s=0.2)
    scene.hold()
    scene.runtime.request_stop()
    until(lambda: scene.counts())
    scene.check(
        ("abandoned", "drain_grace", "c-busy1"),
        ("abandoned", "drain_grace", "c-busy2"),
    )
    scene.release()


def test_every_kind_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    text = text.partition("## What no worker sees")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| (\w+) \|", text, flags=re.MULTILINE)
    documented = {
        event: (logging.getLevelName(level), tuple(re.findall(r"`(\w+)`", reasons)))
        for event, reasons, level in rows
    }
    assert documented == {event: (kind.level, kind.reasons) for event, kind in KINDS.items()}


def test_what_came_from_the_wire_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    incidents = Incidents("m", Counters())
    nasty = ["c-1\nERROR forged", "c-\x1b[2J", "c-" + "x" * 5000, "c-ok"]
    incidents.record("corrupt", "corrupt_message", nasty, "text\r\nforged\x00" + "y" * 5000)
    (record,) = caplog.records
    message = record.getMessage()
    assert message.isprintable()
    assert len(message) < 1500
    assert "'c-1\\nERROR forged'" in message
    assert message.count("c-ok") == 1


def test_many_tasks_make_lines_of_a_few(caplog: pytest.LogCaptureFixture) -> None:
    incidents = Incidents("m", Counters())
    names = [f"c-{number}" for number in range(2 * IDS_PER_LINE + 1)]
    incidents.record("expired", "queued", names)
    incidents.record("expired", "queued", [])
    assert [len(record.task_ids) for record in caplog.records] == [32, 32, 1]  # type: ignore[attr-defined]
    named = [name for r in caplog.records for name in r.task_ids]  # type: ignore[attr-defined]
    assert named == names
    assert incidents.counts()["expired", "queued"] == len(names)


def test_constant_reasons_are_counted_from_zero() -> None:
    counts = Incidents("m", Counters()).counts()
    assert set(counts) == {(e, reason) for e, kind in KINDS.items() for reason in kind.reasons}
    assert set(counts.values()) == {0}
    with pytest.raises(KeyError):
        Incidents("m", Counters()).record("no such event", "x", ["c-1"])


def test_threads_lose_no_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="trtq")
    counters = Counters()
    incidents = Incidents("m", counters)

    def work() -> None:
        for _ in range(2000):
            incidents.record("dropped", "answered_before", ["c-1"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert incidents.counts()["dropped", "answered_before"] == counters.dropped == 8000


class TestClient:
    """What no worker sees: in the client's log, and counted in Redis where Redis can."""

    @pytest.fixture
    def idle(self, connection: redis.Redis, caplog: pytest.LogCaptureFixture) -> redis.Redis:
        """A published model that no worker serves, whose queue takes two rows."""
        from tests.support.specs import SPEC

        caplog.set_level(logging.INFO, logger="trtq")
        spec = SPEC.model_copy(update={"queue_max_rows": 2, "max_rows_per_task": 1})
        connection.hset(keys.MODELS, "m", spec.model_dump_json())
        return connection

    def test_refused_by_a_full_queue(
        self, idle: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Client(redis_url) as client:
            tickets = [client.submit("m", [1], timeout=0) for _ in range(5)]
            refused = [t for t in tickets if until(lambda t=t: t.accepted()) and t.done()]
            assert len(refused) == 3
            assert {type(t.exception(1)).__name__ for t in refused} == {"QueueFull"}
            until(lambda: idle.hget("trtq:{m}:events", "refused:queue_full") == b"3")
        for ticket in refused:
            lines = [r.getMessage() for r in caplog.records if ticket.task_id in r.getMessage()]
            assert lines == [f"task {ticket.task_id} of model 'm' is refused [queue_full]"]

    def test_cancelled_purged_and_given_up(
        self, idle: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        from producer.purge import purge

        with Client(redis_url) as client:
            first, second = client.submit("m", [1]), client.submit("m", [1])
            until(lambda: first.accepted() and second.accepted())
            assert first.cancel()
            assert purge(idle, "m") == 1
            assert second.exception(10) is not None
            third = client.submit("m", [1])
            until(third.accepted)
        assert idle.hgetall("trtq:{m}:events") == {
            b"cancelled:unclaimed": b"1",
            b"purged:operator": b"1",
        }
        lines = [r.getMessage() for r in caplog.records if r.name.startswith("trtq")]
        assert lines == [
            f"task {first.task_id} of model 'm' is cancelled [unclaimed]",
            f"task {second.task_id} of model 'm' is purged [operator]",
            f"task {third.task_id} of model 'm' is given up [client_closed]",
        ]

    def test_no_answer_at_the_deadline(
        self, idle: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Client(redis_url) as client:
            ticket = client.submit("m", [1], deadline=0.05)
            assert type(ticket.exception(20)).__name__ == "DeadlineExceeded"
            until(lambda: idle.hget("trtq:{m}:events", "unanswered:deadline") == b"1")
        lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "trtq.mailbox"]
        assert lines == [
            ("WARNING", f"task {ticket.task_id} of model 'm' has no answer [deadline]")
        ]

    def test_a_client_with_too_many_unsent_tasks(
        self, idle: redis.Redis, redis_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        settings = ProducerSettings(redis_url=redis_url, client_max_unsent=1)
        with Client(settings=settings) as client:
            spec = client.spec("m")
            client._outbox.close(5)
            client.submit("m", [1], timeout=0)
            with pytest.raises(TrtqError):
                client.submit("m", [1], timeout=0)
            assert spec.name == "m"
        refused = [m for m in caplog.messages if "[client_full]" in m]
        assert len(refused) == 1

    def test_the_exporter_shows_no_label_that_is_not_ours(
        self, idle: redis.Redis, redis_url: str
    ) -> None:
        from producer.exporter import QueueCollector

        idle.hset(
            "trtq:{m}:events",
            mapping={"refused:queue_full": 7, 'x"}\n:y': 1, "a:b:c": 1, "no_number:at_all": "z"},
        )
        samples = {
            (s.labels["event"], s.labels["reason"]): s.value
            for family in QueueCollector(idle).collect()
            for s in family.samples
            if s.name == "trtq_queue_events_total"
        }
        assert samples == {("refused", "queue_full"): 7}
