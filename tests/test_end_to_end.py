"""Clients, a real Redis and a real worker process."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import redis
from celery import Celery, chain, chord, group

from producer import AsyncClient, Client, ProducerSettings, Ticket, keys
from producer.errors import (
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    EngineFailed,
    ForbiddenNaN,
    InvalidInput,
    MessageTooLarge,
    NoRows,
    PathNotAllowed,
    QueueFull,
    RedisUnavailable,
    ResultMissing,
    ResultTimeout,
    TooManyRows,
    TrtqError,
    UnknownModel,
    WrongDtype,
    WrongInputName,
    WrongShape,
)
from producer.link import Link
from producer.task import RowReference
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker, until
from workers.inbox import WorkerInbox

ROWS = np.random.default_rng(1).integers(0, 256, (64, 16), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model configurations of the module's worker."""
    made = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(made / "checksum.onnx", 16)
    onnx_models.write_config(made, "checksum", max_batch=64, max_rows_per_task=8)
    onnx_models.two_inputs_model(made / "pair.onnx", 3)
    onnx_models.write_config(made, "pair", max_batch=8, forbid_nan=True)
    onnx_models.dynamic_model(made / "dynamic.onnx")
    onnx_models.write_config(made, "dynamic", max_batch=8, max_task_bytes=4000)
    onnx_models.row_failing_model(made / "failing.onnx")
    onnx_models.write_config(made, "failing", max_batch=64, max_delay_ms=20)
    onnx_models.slow_model(made / "slow.onnx", width=64, work=2000)
    onnx_models.write_config(
        made, "slow", max_batch=4, max_delay_ms=0, threads=1, queue_max_rows=60
    )
    return made


@pytest.fixture(scope="module")
def worker(redis_url: str, folder: Path) -> Iterator[WorkerHandle]:
    """The module's worker; its log ends up in a failing test's output."""
    handle = start_worker(redis_url, folder, bulk_roots=str(folder), lease_ms="2000")
    yield handle
    code = handle.stop()
    print(handle.text[-3000:])
    assert code == 0


@pytest.fixture
def client(redis_url: str, worker: WorkerHandle) -> Iterator[Client]:
    """A connected client."""
    with Client(redis_url) as made:
        yield made


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """A plain connection."""
    with redis.Redis.from_url(redis_url, protocol=2) as made:
        yield made


def test_rows_and_batches_and_lists(client: Client) -> None:
    sums = onnx_models.checksum(ROWS)
    one = client.submit("checksum", ROWS[0]).result(20)
    assert one.shape == ()
    assert one == sums[0]
    several = client.submit("checksum", ROWS[:5]).result(20)
    assert several.tolist() == sums[:5].tolist()
    assert client.submit("checksum", ROWS[0].tolist()).result(20) == sums[0]
    assert client.submit("checksum", {"x": ROWS[:1]}).result(20).tolist() == [sums[0]]
    two = client.submit("pair", {"a": [1, 2, 3], "b": [4.5, 5, 6]}).result(20)
    assert two["sum"].tolist() == [5.5, 7, 9]
    assert two["product"].tolist() == [4.5, 10, 18]


def test_different_shapes_each_get_their_own(client: Client) -> None:
    inputs = [np.arange(1, 2 + n % 5, dtype=np.float32) for n in range(40)]
    for given, squares in zip(inputs, client.map("dynamic", inputs), strict=True):
        assert squares.tolist() == (given * given).tolist()


def test_map_keeps_order_and_as_completed_names_indices(client: Client) -> None:
    sums = onnx_models.checksum(ROWS).tolist()
    assert [int(r) for r in client.map("checksum", iter(ROWS), window=7)] == sums
    found = dict(client.as_completed("checksum", ROWS, window=9, priority="high"))
    assert [int(found[index]) for index in range(len(ROWS))] == sums
    assert list(client.map("checksum", [])) == []
    with pytest.raises(InvalidInput, match="window"):
        list(client.map("checksum", ROWS, window=0))


def test_callbacks_stored_results_and_repr(client: Client) -> None:
    ended = threading.Event()
    seen: list[Ticket] = []

    def on_done(ticket: Ticket) -> None:
        seen.append(ticket)
        ended.set()
        raise RuntimeError("a callback's error is logged, nothing more")

    ticket = client.submit("checksum", ROWS[0], store=True)
    ticket.add_done_callback(on_done)
    assert ended.wait(20)
    assert seen == [ticket]
    assert ticket.done()
    assert ticket.exception() is None
    assert "answered" in repr(ticket)
    late: list[Ticket] = []
    ticket.add_done_callback(late.append)
    assert late == [ticket]
    assert client.result(ticket.task_id).tolist() == [onnx_models.checksum(ROWS)[0]]
    with pytest.raises(ResultMissing):
        client.result("nobody-1")
    failed = client.submit("failing", np.int64(99), store=True)
    assert isinstance(failed.exception(20), EngineFailed)
    with pytest.raises(EngineFailed):
        client.result(failed.task_id)


def test_asyncio(redis_url: str, worker: WorkerHandle) -> None:
    sums = onnx_models.checksum(ROWS).tolist()

    async def use() -> None:
        async with AsyncClient(redis_url) as client:
            ticket = await client.submit("checksum", ROWS[0])
            assert await ticket == sums[0]
            assert await ticket == sums[0]
            assert [int(r) async for r in client.map("checksum", ROWS, window=5)] == sums

            async def source() -> object:
                for row in ROWS:
                    yield row

            found = {i: int(r) async for i, r in client.as_completed("checksum", source())}
            assert [found[index] for index in range(len(ROWS))] == sums
            many = [await client.submit("checksum", row) for row in ROWS]
            assert [int(r) for r in await asyncio.gather(*many)] == sums
            stored = await client.submit("checksum", ROWS[0], store=True)
            await stored
            assert (await client.result(stored.task_id)).tolist() == [sums[0]]
            assert (await client.spec("checksum")).max_batch == 64
            assert "pair" in [spec.name for spec in await client.models()]
            with pytest.raises(UnknownModel):
                await client.submit("nosuch", ROWS[0])
            open_ticket = await client.submit("slow", np.zeros(64, np.float32))
            await client.cancel(open_ticket)

    asyncio.run(use())


@pytest.mark.parametrize(
    ("model", "inputs", "error", "text"),
    [
        ("nosuch", ROWS[0], UnknownModel, "checksum, dynamic"),
        ("no such", ROWS[0], InvalidInput, "letters"),
        ("checksum", {"y": ROWS[0]}, WrongInputName, r"lacks \['x'\] and it knows no \['y'\]"),
        ("pair", ROWS[0], WrongInputName, "dict"),
        ("pair", {"a": [1, 2, 3]}, WrongInputName, "lacks"),
        ("checksum", ROWS[0].astype(np.float32), WrongDtype, "astype"),
        ("checksum", ROWS[0].astype(np.int64), WrongDtype, "without loss"),
        ("checksum", [300] * 16, WrongDtype, "does not fit"),
        ("checksum", [1.5] * 16, WrongDtype, "does not fit"),
        ("checksum", ["a"] * 16, WrongDtype, "no number"),
        ("checksum", [[1, 2], [3]], WrongDtype, "no array"),
        ("checksum", None, WrongDtype, "no number"),
        ("checksum", np.array([object()] * 16), WrongDtype, "object"),
        ("checksum", np.zeros(16, "V1"), WrongDtype, "V1"),
        ("checksum", np.zeros(16, [("f", "u1")]), WrongDtype, "input 'x'"),
        ("checksum", ROWS[0][:15], WrongShape, r"\(16,\), not \(15,\)"),
        ("checksum", ROWS[None], WrongShape, "batch"),
        ("checksum", np.uint8(3), WrongShape, "batch"),
        ("dynamic", np.zeros((2, 0), np.float32), WrongShape, "any"),
        ("pair", {"a": [[1, 2, 3]], "b": [1, 2, 3]}, WrongShape, "same number of rows"),
        ("checksum", ROWS[:0], NoRows, "at least one"),
        ("checksum", ROWS[:9], TooManyRows, "at most 8"),
        ("pair", {"a": [1, float("nan"), 3], "b": [1, 2, 3]}, ForbiddenNaN, "'a'"),
        ("dynamic", np.zeros(1001, np.float32), MessageTooLarge, "4000"),
    ],
)
def test_bad_input_is_named_before_anything_is_sent(
    client: Client, model: str, inputs: object, error: type[TrtqError], text: str
) -> None:
    with pytest.raises(error, match=text):
        client.submit(model, inputs)


def test_bad_options(client: Client) -> None:
    with pytest.raises(InvalidInput, match="priority"):
        client.submit("checksum", ROWS[0], priority="urgent")
    with pytest.raises(InvalidInput, match="deadline"):
        client.submit("checksum", ROWS[0], deadline=0)
    with pytest.raises(InvalidInput, match="reference"):
        client.submit_reference("checksum", RowReference((), (), 0, 9))


def test_one_bad_task_fails_alone(client: Client) -> None:
    tickets = [client.submit("failing", np.int64(99 if n == 7 else n % 10)) for n in range(30)]
    for number, ticket in enumerate(tickets):
        if number == 7:
            with pytest.raises(EngineFailed, match="failing"):
                ticket.result(20)
        else:
            assert ticket.exception(20) is None


def test_entries_that_are_no_tasks(client: Client, raw: redis.Redis) -> None:
    inbox = WorkerInbox(Link(raw), "checksum")
    dead_before = inbox.look().dead
    box = Client(client.redis_url, name="probe").start()
    ticket = box.submit("slow", np.zeros(64, np.float32))
    lost = Ticket("x", "checksum", 1, True, 1e18, box, threading.Lock())
    numbers = iter(range(100, 200))

    def expect() -> Ticket:
        made = Ticket(
            f"{box.client_id}-{next(numbers)}", "checksum", 1, True, 1e18, box, threading.Lock()
        )
        box._mailbox.expect(made)
        return made

    newer, truncated, wrong, huge = expect(), expect(), expect(), expect()
    body = [["x", "float64", [1, 16], b"\0" * 128]]
    frames = [
        msgpack.packb([2, newer.task_id, "future"]),
        msgpack.packb([1, truncated.task_id, 0, 1, 0, 0, body, None])[:-40],
        msgpack.packb([1, wrong.task_id, 0, 1, 0, 0, body, None]),
        msgpack.packb(
            [1, huge.task_id, 0, 1, 0, 0, [["x", "uint8", [1, 2**24], b"\0" * 2**24]], 0]
        ),
        b"\xc1 garbage",
    ]
    for frame in frames:
        raw.xadd(inbox.keys.normal, {"d": frame})
    raw.xadd(inbox.keys.normal, {"other": b"field"})
    codes = [t.exception(20) for t in (newer, truncated, wrong, huge)]
    assert [getattr(c, "code", c) for c in codes] == [
        "unsupported_version",
        "corrupt_message",
        "wrong_dtype",
        "message_too_large",
    ]
    until(lambda: inbox.look().normal == 0)
    assert inbox.look().dead == dead_before + 4
    assert client.submit("checksum", ROWS[0]).result(20) == onnx_models.checksum(ROWS)[0]
    assert ticket.exception(20) is None
    assert not lost.done()
    box.close()


def test_a_vanished_reply_stream_harms_nobody(client: Client, raw: redis.Redis) -> None:
    gone = Client(client.redis_url, name="gone").start()
    tickets = [gone.submit("slow", np.zeros(64, np.float32)) for _ in range(4)]
    until(lambda: all(t.accepted() for t in tickets))
    gone.close()
    assert isinstance(tickets[-1].exception(1), ClientClosed | type(None))
    with pytest.raises(ClientClosed):
        gone.submit("slow", np.zeros(64, np.float32))
    inbox = WorkerInbox(Link(raw), "slow")
    until(lambda: inbox.look().rows == 0)
    key = keys.reply(gone.client_id)
    assert raw.exists(key) == 0 or raw.ttl(key) > 0


def test_cancel_and_deadline_and_priority_and_full_queue(client: Client, raw: redis.Redis) -> None:
    zeros = np.zeros(64, np.float32)
    order: list[str] = []
    inbox = WorkerInbox(Link(raw), "slow")
    batch = [client.submit("slow", zeros) for _ in range(40)]
    until(lambda: inbox.look().claimed > 0)
    urgent = client.submit("slow", zeros, priority="high")
    low = client.submit("slow", zeros, priority="low")
    late = client.submit("slow", zeros, priority="low", deadline=0.001)
    for name, ticket in (("urgent", urgent), ("low", low), ("last", batch[-1])):
        ticket.add_done_callback(lambda _, name=name: order.append(name))
    unclaimed = client.submit("slow", zeros, priority="low")
    until(unclaimed.accepted)
    assert unclaimed.cancel() is True
    assert unclaimed.cancel() is False
    with pytest.raises(Cancelled):
        unclaimed.result(1)
    with pytest.raises(ResultTimeout):
        low.result(0.0)
    flood = [client.submit("slow", zeros, timeout=0) for _ in range(80)]
    refused = [t.exception(30) for t in flood if t.exception(30) is not None]
    assert refused
    assert all(isinstance(error, QueueFull) for error in refused)
    with pytest.raises(DeadlineExceeded):
        late.result(30)
    assert low.exception(30) is None
    assert order.index("urgent") < order.index("last")
    patient = [client.submit("slow", zeros, timeout=30) for _ in range(80)]
    assert all(ticket.exception(30) is None for ticket in patient)


def test_a_claimed_task_is_cancelled_before_it_runs(client: Client, raw: redis.Redis) -> None:
    zeros = np.zeros(64, np.float32)
    inbox = WorkerInbox(Link(raw), "slow")
    until(lambda: inbox.look().rows == 0)
    tickets = [client.submit("slow", zeros) for _ in range(40)]
    until(lambda: inbox.look().claimed > 4)
    claimed = raw.xpending_range(inbox.keys.normal, keys.GROUP, "-", "+", 100)
    last = claimed[-1]["message_id"]
    (held,) = [t for t in tickets if t.entry_id == last]
    assert held.cancel() is False
    outcomes = [t.exception(30) for t in tickets]
    assert {type(o) for o in outcomes} <= {type(None), Cancelled}
    until(lambda: inbox.look().rows == 0)


def test_a_client_started_again_is_another_client(
    redis_url: str, worker: WorkerHandle, raw: redis.Redis
) -> None:
    client = Client(redis_url)
    ids = set()
    for row, wanted in zip(ROWS[:3], onnx_models.checksum(ROWS[:3]), strict=True):
        with client:
            assert client.submit("checksum", row).result(20) == wanted
            ids.add(client.client_id)
    assert len(ids) == 3


def test_closing_in_a_forked_child_leaves_the_parent_alone(client: Client) -> None:
    wanted = onnx_models.checksum(ROWS)
    for number in range(5):
        tickets = [client.submit("checksum", row) for row in ROWS]
        child = os.fork()
        if child == 0:
            client.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [t.result(20) for t in tickets] == wanted.tolist(), number


def test_an_error_is_stored_too(client: Client) -> None:
    zeros = np.zeros(64, np.float32)
    tickets = [client.submit("slow", zeros, store=True, deadline=0.001) for _ in range(40)]
    late = [t for t in tickets if isinstance(t.exception(30), DeadlineExceeded)]
    assert late
    for ticket in late:
        with pytest.raises(DeadlineExceeded):
            client.result(ticket.task_id)


def test_celery_canvas_over_infer(redis_url: str, worker: WorkerHandle, folder: Path) -> None:
    gateway = start_worker(redis_url, folder, name="infer", queues="trtq.infer", concurrency=8)
    try:
        app = Celery("any", broker=redis_url, backend=redis_url, set_as_current=False)
        app.conf.task_routes = {"trtq.*": {"queue": "trtq.infer"}}
        sums = onnx_models.checksum(ROWS).tolist()

        def infer(*args: object) -> object:
            return app.signature("trtq.infer", args=args)

        many = group([infer("checksum", row.tolist()) for row in ROWS[:16]], app=app)
        assert many.apply_async().get(timeout=30) == sums[:16]
        squares = chain(infer("dynamic", [1.0, 2.0]), infer("dynamic"), app=app)
        assert squares.apply_async().get(timeout=30) == [1.0, 16.0]
        header = [infer("dynamic", [2.0, 3.0]), infer("dynamic", [1.0, 0.0])]
        both = chord(header, infer("dynamic"), app=app)
        assert both.apply_async().get(timeout=30) == [[16.0, 81.0], [1.0, 0.0]]
        npy = io.BytesIO()
        np.save(npy, ROWS[3])
        text = base64.b64encode(npy.getvalue()).decode()
        assert infer("checksum", text).apply_async().get(timeout=30) == sums[3]
        with pytest.raises(Exception, match=r"WrongShape|takes rows"):
            infer("checksum", [1, 2]).apply_async().get(timeout=30)
        with pytest.raises(Exception, match="base64"):
            infer("checksum", "no base64!").apply_async().get(timeout=30)
        app.close()
    finally:
        assert gateway.stop() == 0


def test_four_processes_two_thousand_tasks(redis_url: str, worker: WorkerHandle) -> None:
    command = [sys.executable, "-m", "tests.support.load", redis_url]
    processes = [
        subprocess.Popen([*command, str(seed), "500"], cwd=ROOT, stdout=subprocess.PIPE)
        for seed in range(4)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=90)
        assert json.loads(output) == {"answered": 500, "distinct": 500, "wrong": 0}


def test_references_are_refused_outside_the_roots(client: Client, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", ROWS)
    reference = RowReference(
        (("x", str(tmp_path / "in.npy")),), (("sum", str(tmp_path / "out.npy")),), 0, 4
    )
    with pytest.raises(PathNotAllowed, match="TRTQ_BULK_ROOTS"):
        client.submit_reference("checksum", reference).result(20)


def test_no_redis_is_named_without_its_password() -> None:
    settings = ProducerSettings(redis_url="redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1") as failure:
        Client(settings=settings).start()
    assert "secret" not in str(failure.value)


def test_streams_are_empty_at_the_end(client: Client, raw: redis.Redis) -> None:
    for model in ("checksum", "pair", "dynamic", "failing", "slow"):
        inbox = WorkerInbox(Link(raw), model)
        until(lambda inbox=inbox: inbox.look().rows == 0)
        assert inbox.look()[:6] == (0, 0, 0, 0, 0, 0)
