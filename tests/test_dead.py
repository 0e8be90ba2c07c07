"""Dead letters on a real Redis and with a real worker: kept, bounded, listed, requeued, dropped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from producer import Client, keys
from producer.cli import app
from producer.dead import DeadLetters
from producer.embedded import EmbeddedRedis
from producer.entries import Entry, Settlement
from producer.errors import (
    CorruptMessage,
    InvalidInput,
    MessageTooLarge,
    PoisonTask,
    QueueFull,
    UnknownDeadLetter,
    UnknownModel,
    WrongDtype,
)
from producer.letters import DeadLetter, LetterLimits, encode_letter
from producer.link import Link
from producer.purge import purge
from producer.spec import TensorSpec
from producer.task import InferenceTask, Reply, RowReference, Tensor
from producer.wire import decode_task, encode_reply, encode_task
from tests.support import models as onnx_models
from tests.support.processes import WorkerHandle, start_worker, until
from tests.support.specs import SPEC
from workers.inbox import WorkerInbox

Run = Callable[..., Result]


def frame_of(task_id: str, rows: int = 1, dtype: str = "uint8") -> bytes:
    data = bytes(rows * np.dtype(dtype).itemsize)
    return encode_task(InferenceTask(task_id, rows, (Tensor("x", dtype, (rows, 1), data),)))


def poisoned(entry: Entry, task_id: str, message: str = "it kills") -> Settlement:
    letter = encode_letter(
        task_id, "poison_task", message, entry.stream, entry.rows, entry.deliveries,
        entry.holders, entry.entry_id, len(entry.frame or b""),
    )  # fmt: skip
    reply = encode_reply(Reply(task_id, error_code="poison_task", error_message=message))
    return Settlement(entry, entry.rows, "c", reply, letter=letter)


class Queue:
    """One model's queue, and a way to let tasks die in it."""

    def __init__(self, connection: redis.Redis, limits: LetterLimits | None = None) -> None:
        self.connection = connection
        self.inbox = WorkerInbox(Link(connection), "m", limits)
        self.letters = DeadLetters(connection, "m")
        self.flush = 0
        connection.hset(keys.MODELS, "m", SPEC.model_dump_json())

    def add(self, frame: bytes, rows: int = 1, priority: int = 1) -> None:
        self.flush += 1
        _, (entry_id,) = self.inbox.add(SPEC, priority, "c", self.flush, [(rows, frame)])
        assert entry_id is not None

    def die(self, task_id: str, frame: bytes | None = None, **options: int) -> DeadLetter:
        self.add(frame_of(task_id) if frame is None else frame, **options)
        (entry,) = self.inbox.claim("w", 1).entries
        assert self.inbox.settle([poisoned(entry, task_id)]).answered == 1
        return next(self.letters.letters(1))


@pytest.fixture
def queue(connection: redis.Redis) -> Queue:
    return Queue(connection)


def test_a_letter_is_kept_with_the_answer_or_not_at_all(
    queue: Queue, connection: redis.Redis
) -> None:
    queue.add(frame_of("c-1", 3), rows=3, priority=2)
    (entry,) = queue.inbox.claim("first", 3).entries
    (entry,) = until(lambda: queue.inbox.reclaim("second", 1, 9, 9, False).entries)
    assert (entry.holders, entry.handed_back) == (("first",), False)
    (entry,) = until(lambda: queue.inbox.reclaim("third", 1, 9, 9, False).entries)
    assert entry.holders == ("first", "second")
    before_ms = time.time() * 1000
    assert queue.inbox.settle([poisoned(entry, "c-1")]).answered == 1
    # A second worker that gives it up as well finds it settled: no second letter.
    assert queue.inbox.settle([poisoned(entry, "c-1")]).dropped == (0,)
    (letter,) = queue.letters.letters()
    assert (letter.task_id, letter.code, letter.message) == ("c-1", "poison_task", "it kills")
    assert (letter.priority, letter.rows, letter.deliveries) == (2, 3, 2)
    assert letter.workers == ("first", "second")
    assert letter.queued_ms == int(entry.entry_id.partition(b"-")[0])
    assert abs(letter.died_ms - before_ms) < 60_000
    assert letter.kept
    assert queue.letters.frame(letter) == frame_of("c-1", 3)
    assert letter.frame_bytes == len(frame_of("c-1", 3))
    for key in (queue.inbox.keys.dead_letters, queue.inbox.keys.dead_bytes):
        assert 0 < connection.ttl(key) <= LetterLimits().ttl_s
    assert connection.hlen(queue.inbox.keys.holders) == 0
    assert queue.inbox.look().dead == 1


def test_a_worker_that_handed_a_task_back_did_not_die_of_it(queue: Queue) -> None:
    queue.add(frame_of("c-1"))
    (entry,) = queue.inbox.enter("stops", 1).entries
    queue.inbox.release("stops", [entry], 10_000)
    (entry,) = queue.inbox.reclaim("next", 10_000, 9, 9, False).entries
    assert (entry.holders, entry.handed_back) == ((), True)


def test_an_entry_deleted_while_a_worker_held_it_is_counted_and_logged(
    queue: Queue, connection: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    queue.add(frame_of("c-1"))
    queue.add(frame_of("c-2"))
    entry, _ = queue.inbox.enter("w", 2).entries
    connection.xdel(queue.inbox.keys.normal, entry.entry_id)
    (left,) = until(lambda: queue.inbox.reclaim("x", 1, 9, 9, False).entries)
    assert left.frame == frame_of("c-2")
    assert connection.hgetall(queue.inbox.keys.events) == {b"vanished:deleted": b"1"}
    assert f"entry 1:{entry.entry_id.decode()} of model 'm' was deleted" in caplog.text


def test_the_oldest_go_first_when_there_are_too_many(connection: redis.Redis) -> None:
    queue = Queue(connection, LetterLimits(tasks=2))
    queue.die("c-1")
    queue.die("c-2")
    queue.add(frame_of("c-3"))
    (entry,) = queue.inbox.claim("w", 1).entries
    assert queue.inbox.settle([poisoned(entry, "c-3")]).old_letters == (
        ("c-1", "poison_task", "count"),
    )
    assert [letter.task_id for letter in queue.letters.letters()] == ["c-3", "c-2"]
    assert [letter.task_id for letter in queue.letters.letters(newest=False)] == ["c-2", "c-3"]


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=12),
    # The facts of one letter take some 400 bytes.
    most=st.integers(500, 1200),
    drops=st.sets(st.integers(0, 11)),
)
@settings(max_examples=25, deadline=None)
def test_bytes_are_bounded_and_counted_exactly(
    redis_url: str, sizes: list[int], most: int, drops: set[int]
) -> None:
    with redis.Redis.from_url(redis_url, protocol=2) as connection:
        connection.flushdb()
        check_bytes(connection, sizes, most, drops)


def check_bytes(connection: redis.Redis, sizes: list[int], most: int, drops: set[int]) -> None:
    queue = Queue(connection, LetterLimits(bytes=most))
    k = queue.inbox.keys
    for number, size in enumerate(sizes):
        letter = queue.die(f"c-{number}", b"z" * size)
        stored = connection.xrange(k.dead_letters)
        held = sum(len(n) + len(v) for _, fields in stored for n, v in fields.items())
        assert held <= most
        assert int(connection.get(k.dead_bytes) or 0) == held
        assert letter.task_id == f"c-{number}"
        assert letter.frame_bytes == size
        if letter.kept:
            assert queue.letters.frame(letter) == b"z" * size
        if number in drops:
            assert queue.letters.drop([letter]) == 1
    queue.letters.drop(list(queue.letters.letters()))
    assert connection.exists(k.dead_letters, k.dead_bytes) == 0


def test_a_frame_larger_than_all_letters_is_left_out_and_says_so(connection: redis.Redis) -> None:
    queue = Queue(connection, LetterLimits(bytes=400))
    letter = queue.die("c-1", b"z" * 500)
    assert not letter.kept
    with pytest.raises(MessageTooLarge, match=r"500 bytes.*TRTQ_DEAD_MAX_BYTES"):
        queue.letters.requeue(letter)
    assert len(queue.letters) == 1


def test_a_requeued_task_is_a_new_one(queue: Queue, connection: redis.Redis) -> None:
    letter = queue.die("c-1", frame_of("c-1", 2), rows=2, priority=0)
    told = connection.llen(keys.reply("c"))
    done = queue.letters.requeue(letter, deadline_s=5)
    assert len(queue.letters) == 0
    assert connection.exists(queue.inbox.keys.dead_bytes) == 0
    state = queue.inbox.look()
    assert (state.high, state.rows, state.bells) == (1, 2, 1)
    (entry,) = queue.inbox.enter("w", 9).entries
    assert (entry.stream, entry.rows, entry.deliveries) == (0, 2, 0)
    assert entry.entry_id.decode() == done.entry_id
    task = decode_task(entry.frame or b"")
    assert task.task_id == done.task_id != "c-1"
    assert (task.ttl_ms, task.store_s) == (5000, 3600)
    assert task.inputs == decode_task(frame_of("c-1", 2)).inputs
    assert connection.hget(queue.inbox.keys.events, "requeued:operator") == b"1"
    # The first sender was told once and hears nothing of the second run.
    queue.inbox.settle(
        [Settlement(entry, 2, "requeued", encode_reply(Reply(task.task_id, error_code="x")))]
    )
    assert connection.llen(keys.reply("c")) == told
    assert queue.inbox.look().rows == 0
    with pytest.raises(UnknownDeadLetter):
        queue.letters.requeue(letter)


def test_what_cannot_be_requeued_stays(queue: Queue, connection: redis.Redis) -> None:
    letters = queue.letters
    wrong = queue.die("c-1", frame_of("c-1", dtype="float32"))
    with pytest.raises(WrongDtype):
        letters.requeue(wrong)
    garbage = queue.die("c-2", b"\xc1 garbage")
    with pytest.raises(CorruptMessage):
        letters.requeue(garbage)
    good = queue.die("c-3")
    with pytest.raises(InvalidInput, match="deadline"):
        letters.requeue(good, deadline_s=0)
    reference = RowReference((("x", "/a"),), (("y", "/b"),), 0, 9)
    far = queue.die("c-4", encode_task(InferenceTask("c-4", 9, reference=reference)))
    with pytest.raises(InvalidInput, match="9 referenced rows"):
        letters.requeue(far)
    for number in range(SPEC.queue_max_rows // 4):
        queue.add(frame_of(f"c-{number}", 4), rows=4)
    with pytest.raises(QueueFull, match="stays"):
        letters.requeue(good)
    connection.hdel(keys.MODELS, "m")
    with pytest.raises(UnknownModel):
        letters.requeue(good)
    assert len(letters) == 4
    letters.check()
    letters.drop([wrong, garbage, good, far, good])
    with pytest.raises(UnknownModel, match="no model 'm'"):
        letters.check()


def test_letters_are_found_by_their_id_or_their_tasks(queue: Queue) -> None:
    first, second = queue.die("c-1"), queue.die("1-2")
    assert queue.letters.letter("c-1") == first
    assert queue.letters.letter("1-2") == second
    assert queue.letters.letter(first.letter_id) == first
    for name in ("c-9", "5-5", "", "(", "c-1\x1b[31m"):
        with pytest.raises(UnknownDeadLetter) as raised:
            queue.letters.letter(name)
        assert str(raised.value).isprintable()


def test_a_long_list_comes_in_pages(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.dead._PAGE", 3)
    for number in range(8):
        queue.die(f"c-{number}")
    names = [letter.task_id for letter in queue.letters.letters(7)]
    assert names == [f"c-{number}" for number in range(7, 0, -1)]
    assert queue.letters.drop(list(queue.letters.letters())) == 8


def test_purge_removes_letters_of_this_and_of_earlier_releases(
    queue: Queue, connection: redis.Redis
) -> None:
    queue.die("c-1")
    connection.rpush("trtq:{m}:dead", "{}")
    queue.add(frame_of("c-2"))
    assert purge(connection, "m") == 1
    assert connection.exists("trtq:{m}:dead", queue.inbox.keys.dead_letters) == 0
    counts = connection.hgetall(queue.inbox.keys.events)
    assert counts == {b"purged:operator": b"1", b"dead_dropped:operator": b"1"}


def test_letters_come_and_go_at_maxmemory() -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url, protocol=2) as raw:
        queue = Queue(raw)
        queue.add(frame_of("c-1"))
        queue.add(frame_of("c-2"))
        queue.add(frame_of("c-3"))
        raw.config_set("maxmemory-policy", "noeviction")
        raw.config_set("maxmemory", 1)
        entries = queue.inbox.enter("w", 3).entries
        queue.inbox.settle([poisoned(entry, f"c-{n}") for n, entry in enumerate(entries)])
        first, second, third = queue.letters.letters()
        queue.letters.requeue(first)
        assert queue.letters.drop([second]) == 1
        assert queue.letters.letter(third.letter_id) == third
        assert purge(raw, "m") == 1
        assert len(queue.letters) == 0


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHandle]:
    folder = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(folder / "checksum.onnx", 16)
    onnx_models.write_config(folder, "checksum", max_batch=64)
    handle = start_worker(redis_url, folder, lease_ms="500", max_deliveries="1")
    yield handle
    assert handle.stop() == 0


@pytest.fixture
def run(redis_url: str) -> Run:
    runner = CliRunner(env={"TRTQ_REDIS_URL": redis_url, "COLUMNS": "240"})
    return lambda *args, **kwargs: runner.invoke(app, [str(arg) for arg in args], **kwargs)


def test_from_poison_to_a_stored_result(
    redis_url: str, worker: WorkerHandle, run: Run, tmp_path: Path
) -> None:
    row = np.arange(16, dtype=np.uint8)
    with redis.Redis.from_url(redis_url, protocol=2) as raw, Client(redis_url) as client:
        inbox = WorkerInbox(Link(raw), "checksum")
        until(lambda: raw.hexists(keys.MODELS, "checksum"))
        # As if the task had been taken by two workers that both died: held, then held alone.
        task_id = "gone.ab-1"
        frame = encode_task(
            InferenceTask(task_id, 1, (Tensor("x", "uint8", (1, 16), row.tobytes()),))
        )
        inbox.ensure_groups()
        low = inbox.keys.low
        with raw.pipeline(transaction=True) as at_once:
            at_once.xadd(low, {"d": frame}, id="1-1")
            at_once.xreadgroup(keys.GROUP, "died-1", {low: ">"}, count=1)
            at_once.xclaim(low, keys.GROUP, "died-2", 0, ["1-1"], idle=60_000, retrycount=2)
            at_once.execute()
        assert int(client.submit("checksum", row).result(20)) == onnx_models.checksum(row[None])[0]
        until(lambda: inbox.look().dead == 1)
        listed = json.loads(run("dead", "list", "--json").stdout)
        assert [one["task_id"] for one in listed] == [task_id]
        assert listed[0]["workers"] == ["died-2"]
        assert listed[0]["code"] == PoisonTask.code
        assert listed[0]["priority"] == "low"
        table = run("dead", "list", "checksum").stdout
        assert all(text in table for text in (listed[0]["id"], task_id, "poison_task"))
        assert "dead" in run("status").stdout
        shown = run("dead", "show", "checksum", task_id, "--output", tmp_path / "inputs.npz")
        assert shown.exit_code == 0, shown.output
        assert "x: uint8 1x16" in shown.stdout
        assert np.load(tmp_path / "inputs.npz")["x"].tolist() == [row.tolist()]
        document = json.loads(run("dead", "show", "checksum", task_id, "--json").stdout)
        assert document["inputs"] == [{"name": "x", "dtype": "uint8", "shape": [1, 16]}]
        answers = raw.llen(keys.reply("gone.ab"))
        requeued = run("dead", "requeue", "checksum", task_id)
        assert requeued.exit_code == 0, requeued.output
        new_id = requeued.stdout.strip()
        until(lambda: raw.exists(keys.result(new_id)))
        result = run("result", new_id)
        assert json.loads(result.stdout) == onnx_models.checksum(row[None]).tolist()
        assert raw.llen(keys.reply("gone.ab")) == answers
        assert json.loads(run("dead", "list", "--json").stdout) == []
        assert "no dead letters" in run("dead", "list").stdout


def test_the_commands_with_many_letters(connection: redis.Redis, run: Run) -> None:
    queue = Queue(connection)
    first = queue.die("c-1")
    queue.die("c-2", b"\xc1 garbage")
    reference = RowReference((("x", "/data/a.npy"),), (("y", "/data/b.npy"),), 3, 5)
    queue.die("c-3", encode_task(InferenceTask("c-3", 2, reference=reference)), rows=2)
    assert run("dead", "drop", "m", "--all", input="n\n").exit_code == 1
    assert run("dead", "requeue", "m", "--all", input="n\n").exit_code == 1
    assert len(queue.letters) == 3
    limited = run("dead", "list", "m", "--limit", 1)
    assert "c-3" in limited.stdout
    assert "c-1" not in limited.stdout
    assert "1 of 3" in limited.stderr
    shown = run("dead", "show", "m", "c-3")
    assert all(text in shown.stdout for text in ("3 to 5", "/data/a.npy", "/data/b.npy"))
    assert run("dead", "show", "m", "c-3", "--output", "a.npz").exit_code == 2
    unread = run("dead", "show", "m", "c-2")
    assert unread.exit_code == 0
    assert "corrupt_message" in unread.stdout
    some = run("dead", "requeue", "m", "--all", "--yes")
    assert some.exit_code == 1
    assert len(some.stdout.split()) == 2
    assert some.stderr.startswith("error [corrupt_message]: ")
    assert [letter.task_id for letter in queue.letters.letters()] == ["c-2"]
    assert run("dead", "requeue", "m", first.letter_id).exit_code == 2
    assert "1 dead letters dropped" in run("dead", "drop", "m", "c-2").stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("list", "none"), "unknown_model"),
        (("show", "none", "1-1"), "unknown_model"),
        (("requeue", "none", "1-1"), "unknown_model"),
        (("drop", "none", "--all", "--yes"), "unknown_model"),
        (("show", "m", "1-1"), "unknown_dead_letter"),
        (("requeue", "m", "1-1"), "unknown_dead_letter"),
        (("drop", "m", "1-1"), "unknown_dead_letter"),
        (("drop", "m"), "invalid_input"),
        (("requeue", "m", "1-1", "--all"), "invalid_input"),
        (("show", "m", "c-1", "--output", "a.npy"), "invalid_input"),
        (("list", "no{name"), "invalid_input"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_2(
    connection: redis.Redis, run: Run, args: tuple[str, ...], code: str
) -> None:
    connection.hset(keys.MODELS, "m", SPEC.model_dump_json())
    refused = run("dead", *args)
    assert refused.exit_code == 2, refused.output
    assert refused.stderr.startswith(f"error [{code}]: ")
    assert refused.stderr.count("\n") == 1


def test_what_came_from_the_wire_cannot_write_to_the_terminal(
    connection: redis.Redis, run: Run, tmp_path: Path
) -> None:
    queue = Queue(connection)
    nasty = "c\x1b[2J[red]\n-1"
    tensors = [["../../x", "uint8", [1, 1], b"\0"], ["\x1b[31m", "uint8", [1, 1], b"\0"]]
    frame = msgpack.packb([1, nasty, 0, 1, 0, 0, tensors, None])
    letter = queue.die(nasty, frame)
    assert letter.task_id == nasty
    for shown in (run("dead", "list"), run("dead", "show", "m", letter.letter_id)):
        assert shown.exit_code == 0, shown.output
        assert "\x1b" not in shown.output
        assert "\\x1b[2J[red]\\n-1" in shown.output
    refused = run("dead", "show", "m", letter.letter_id, "--output", tmp_path / "a.npz")
    assert refused.exit_code == 2
    assert "\x1b[31m" not in refused.output.replace("\x1b[31merror", "")
    assert not list(tmp_path.iterdir())


def test_a_changed_model_keeps_its_letters(queue: Queue, connection: redis.Redis) -> None:
    letter = queue.die("c-1")
    other = SPEC.model_copy(update={"inputs": (TensorSpec(name="x", dtype="int8", shape=(1,)),)})
    connection.hset(keys.MODELS, "m", other.model_dump_json())
    with pytest.raises(WrongDtype):
        queue.letters.requeue(letter)
    assert len(queue.letters) == 1


@pytest.mark.parametrize("command", ["list", "show", "requeue", "drop"])
def test_each_help_shows_an_example(run: Run, command: str) -> None:
    shown = run("dead", command, "--help")
    assert shown.exit_code == 0
    assert f"trtq dead {command}" in shown.stdout
