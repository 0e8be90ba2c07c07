"""A queue that gets more than its workers do: who still finds room, and who is served next."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from producer import Client, keys
from producer.config import ProducerSettings
from producer.entries import Settlement
from producer.errors import QueueFull
from producer.keys import PRIORITIES
from producer.link import Link
from producer.spec import ModelSpec
from producer.task import InferenceTask, Tensor
from producer.wire import encode_task
from tests.support.fake_engine import FakeEngine
from tests.support.models import write_config
from tests.support.processes import until
from tests.support.specs import SPEC
from workers import runtime
from workers.batcher import AGING_MS, Held, choose
from workers.claims import ClaimOrder
from workers.inbox import WorkerInbox
from workers.models import load_models
from workers.runtime import Runtime
from workers.settings import WorkerSettings

HIGH, NORMAL, LOW = range(3)
FLUSHES = itertools.count()
WIDE = SPEC.model_copy(update={"queue_max_rows": 100, "queue_max_bytes": 100_000})


@pytest.fixture
def inbox(connection: redis.Redis) -> WorkerInbox:
    return WorkerInbox(Link(connection), "m")


def accepted(
    inbox: WorkerInbox, spec: ModelSpec, priority: int, count: int, frame: bytes = b"x"
) -> int:
    _, ids = inbox.add(spec, priority, "c", next(FLUSHES), [(1, frame)] * count)
    return sum(entry_id is not None for entry_id in ids)


@pytest.mark.parametrize("frame", [b"x", b"x" * 1000])
def test_a_flood_leaves_room_for_more_urgent_tasks(inbox: WorkerInbox, frame: bytes) -> None:
    # 100 tasks fill the limit of rows with small frames and the limit of bytes with large ones.
    spec = WIDE if len(frame) == 1 else WIDE.model_copy(update={"queue_max_rows": 10_000})
    spec = spec.model_copy(update={"max_task_bytes": 1000})
    assert accepted(inbox, spec, LOW, 200, frame) == 90
    assert accepted(inbox, spec, NORMAL, 200, frame) == 5
    assert accepted(inbox, spec, HIGH, 200, frame) == 5
    assert accepted(inbox, spec, HIGH, 1, frame) == 0


def test_an_urgent_flood_takes_the_whole_queue(inbox: WorkerInbox) -> None:
    assert accepted(inbox, WIDE, HIGH, 200) == 100
    assert accepted(inbox, WIDE, LOW, 1) == 0


limits = st.integers(1, 10**9)


@given(limits, limits, limits, limits)
def test_an_empty_queue_takes_every_task(rows: int, task: int, size: int, frame: int) -> None:
    spec = SPEC.model_copy(
        update={
            "queue_max_rows": max(rows, task),
            "max_rows_per_task": task,
            "queue_max_bytes": max(size, frame),
            "max_task_bytes": frame,
        }
    )
    whole = (spec.queue_max_rows, spec.queue_max_bytes)
    found = [spec.queue_limits(priority) for priority in range(len(PRIORITIES))]
    assert found[HIGH] == whole
    assert found[HIGH] >= found[NORMAL] >= found[LOW]
    for most_rows, most_bytes in found:
        assert task <= most_rows <= whole[0]
        assert frame <= most_bytes <= whole[1]


def test_the_error_tells_the_limit_of_the_priority(connection: redis.Redis, redis_url: str) -> None:
    connection.hset(keys.MODELS, "m", WIDE.model_dump_json())
    with Client(redis_url) as client:
        flood = [client.submit("m", [1], priority="low", timeout=0) for _ in range(95)]
        urgent = client.submit("m", [1], priority="high", timeout=0)
        refused = [t for t in flood if until(lambda t=t: t.accepted()) and t.done()]
        assert until(urgent.accepted)
        assert not urgent.done()
        # 90 rows of any priority: the urgent one may have come before the last of them.
        assert len(refused) in (5, 6)
        with pytest.raises(QueueFull, match=r"priority 'low' \(90 rows"):
            refused[0].result(0)


def test_many_waiting_tasks_hold_up_no_other_of_their_client(
    connection: redis.Redis, redis_url: str
) -> None:
    for name in ("m", "other"):
        spec = WIDE.model_copy(update={"name": name})
        connection.hset(keys.MODELS, name, spec.model_dump_json())
    with Client(redis_url) as client:
        flood = [client.submit("m", [1], priority="low", timeout=60) for _ in range(6000)]
        later = [
            client.submit("m", [1], priority="high", timeout=60),
            client.submit("other", [1], priority="low", timeout=60),
        ]
        until(lambda: all(ticket.accepted() for ticket in later))
        assert not any(ticket.done() for ticket in later)
        assert sum(ticket.accepted() for ticket in flood) == 90


def test_what_waits_counts_as_unsent(connection: redis.Redis, redis_url: str) -> None:
    connection.hset(keys.MODELS, "m", WIDE.model_dump_json())
    settings = ProducerSettings(client_max_unsent=20)
    with Client(redis_url, settings=settings) as client:
        flood = [client.submit("m", [1], priority="low", timeout=60) for _ in range(110)]

        def refused() -> str:
            try:
                client.submit("m", [1], timeout=0)
            except QueueFull as failure:
                return str(failure)
            return ""

        assert "20 tasks of this client" in until(refused)
        assert all(ticket.cancel() for ticket in flood[90:])
        client.submit("m", [1], timeout=10)


def test_every_stream_gets_its_claims() -> None:
    order = ClaimOrder()
    quarter = [HIGH, HIGH, HIGH, NORMAL]
    assert [order.next() for _ in range(32)] == 2 * (3 * quarter + [HIGH, HIGH, HIGH, LOW])


def test_low_tasks_go_on_while_urgent_ones_never_end(inbox: WorkerInbox) -> None:
    """Turn, batcher and queue of a worker with one slot, step by step; a batch takes 20 ms."""
    spec = WIDE.model_copy(update={"queue_max_rows": 1000})
    assert accepted(inbox, spec, LOW, 40) == 40
    order, now_ms, batches, urgent = ClaimOrder(), 0.0, 0, 0
    held: list[Held] = []
    ended: list[float] = []
    while len(ended) < 40:
        accepted(inbox, spec, HIGH, 8)
        if len(held) <= 4:
            for entry in inbox.claim("w", 8 - len(held), order.next()).entries:
                task = InferenceTask(entry.entry_id.decode(), 1)
                held.append(Held(entry, task, (), now_ms, float("inf")))
        batch, _ = choose(held, now_ms, max_batch=4, max_delay_ms=0, idle=True)
        assert len(batch) == 4
        batches += 1
        now_ms += 20
        held = [one for one in held if one not in batch]
        inbox.settle([Settlement(one.entry, 1, None, b"") for one in batch])
        ended += [now_ms for one in batch if one.entry.stream == LOW]
        urgent += sum(one.entry.stream == HIGH for one in batch)
        # Four of each 16 claims' 64 rows, and what is held is run when it has aged.
        assert batches <= 40 * 16 / 4 + AGING_MS / 20 + 2
    gaps = [after - before for before, after in zip([0.0, *ended], ended, strict=False)]
    assert max(gaps) <= 16 * 20 + AGING_MS + 20
    assert urgent == 4 * batches - 40


def test_short_turns_starve_nobody(connection: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """Each turn here is one claim, as where two busy models share a worker."""
    engine = FakeEngine(lambda inputs: {"y": inputs["x"]}, SPEC.inputs, SPEC.outputs)
    write_config(tmp_path, "m", max_batch=2, max_delay_ms=0)
    settings = WorkerSettings(redis_url=redis_url, turn_budget_s=1e-9)
    deaths: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "make_engine", lambda config, **_: engine)
        worker = Runtime(settings, "w", load_models([tmp_path]), deaths.append, lambda: False)
        worker.start()
    inbox = WorkerInbox(Link(connection), "m")
    spec = worker.models[0].spec
    frame = encode_task(InferenceTask("c-1", 1, (Tensor("x", "uint8", (1, 1), b"1"),)))
    try:
        assert accepted(inbox, spec, LOW, 1, frame) == 1
        for _ in range(16):
            accepted(inbox, spec, HIGH, 8, frame)
            worker.turn("m", "test")
        assert inbox.look().low == 0
        assert inbox.look().high > 0
        assert not deaths
    finally:
        worker.close()
