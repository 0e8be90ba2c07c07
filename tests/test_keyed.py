"""Idempotency keys on a real Redis: any order of submits, ends, retries and losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

import msgpack
import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from producer import keys
from producer.dead import DeadLetters
from producer.entries import Entry, Settlement
from producer.errors import BatchTimeout, InvalidInput, KeyConflict, QueueFull
from producer.keyed import Answer, KeyedInbox, KeyedTask, Repeated, TaskKey, task_key
from producer.limits import RateLimit
from producer.link import Link
from producer.purge import purge
from producer.scripts import packed
from producer.task import InferenceTask, Reply, Tensor, client_of
from producer.wire import decode_replies, encode_reply, encode_task, sender_of
from tests.support.specs import SPEC
from workers.inbox import SCRIPT_BYTES, WorkerInbox
from workers.incidents import Incidents
from workers.intake import Held, Intake
from workers.metrics import Counters
from workers.stages import Stages

WINDOW_MS = 600_000
PENDING_MS = 900_000
MOST_WAITERS = 3


def key_name(key: str) -> str:
    """Of clients named `t`."""
    return f"t:{sha256(key.encode()).hexdigest()}"


class Queue:
    """One model's queue as a client and a worker use it."""

    def __init__(self, connection: redis.Redis, link: Link | None = None) -> None:
        self.redis = connection
        link = link or Link(connection)
        self.inbox = WorkerInbox(link, "m")
        self.keyed = KeyedInbox(self.inbox, link, MOST_WAITERS)
        self.numbers: dict[str, int] = {}

    def task(self, client: str, key: str, content: str = "x", rows: int = 1) -> KeyedTask:
        number = self.numbers[client] = self.numbers.get(client, 0) + 1
        task_id = f"t.{client}-{number}"
        tensor = Tensor("x", "uint8", (rows, 1), content.encode() * rows)
        frame = encode_task(InferenceTask(task_id, rows, (tensor,), store_s=600))
        named = TaskKey(key_name(key), content.encode(), WINDOW_MS, PENDING_MS)
        return KeyedTask(task_id, rows, frame, named)

    def add(self, task: KeyedTask, priority: int = 1) -> Answer:
        (answer,) = self.keyed.add(SPEC, priority, client_of(task.task_id), [task])
        return answer

    def cancel(self, task: KeyedTask, priority: int, entry_id: bytes) -> int:
        facts = task.rows, len(task.frame), task.key.name
        return self.inbox.cancel(priority, entry_id, *facts)

    def settle(self, entry: Entry, outcome: str, *, frees_key: bool = False) -> bytes:
        task_id = sender_of(entry.frame or b"")
        assert task_id is not None
        reply = encode_reply(Reply(task_id, error_code=outcome))
        stored = keys.result(task_id)
        end = Settlement(
            entry, entry.rows, client_of(task_id), reply, stored, 600, frees_key=frees_key
        )
        self.inbox.settle([end])
        return reply

    def told(self, client: str) -> dict[str, list[str]]:
        """Tasks whose outcome the client's waiting submits were told to fetch, by submit."""
        found: dict[str, list[str]] = {}
        for blob in self.redis.lrange(keys.reply(client), 0, -1):
            for reply in decode_replies(blob):
                if reply.stored_as:
                    found.setdefault(reply.task_id, []).append(reply.stored_as)
        return found

    def told_of(self, task: KeyedTask) -> list[str]:
        return self.told(client_of(task.task_id)).get(task.task_id, [])

    def record(self, task: KeyedTask) -> str:
        return keys.record("m", task.key.name)


def intake_of_m() -> Intake:
    counters = Counters()
    incidents = Incidents("m", counters)
    return Intake(
        SPEC, counters, Stages(), incidents, lambda: 0.0, bulk_allowed=False, max_deliveries=3
    )


@pytest.fixture
def queue(connection: redis.Redis) -> Queue:
    return Queue(connection)


def test_a_repeat_waits_and_later_ones_get_the_stored_outcome(queue: Queue) -> None:
    first, second = queue.task("a", "k"), queue.task("b", "k")
    assert isinstance(queue.add(first), bytes)
    assert queue.add(second) == Repeated("t.a-1", None)
    (entry,) = queue.inbox.claim("w", 9).entries
    assert entry.key == first.key.name
    reply = queue.settle(entry, "engine_failed")
    assert queue.told_of(second) == ["t.a-1"]
    assert queue.add(queue.task("c", "k")) == Repeated("t.a-1", reply)
    assert queue.inbox.look()[:5] == (0, 0, 0, 0, 0)


def test_keys_of_two_models_differ(queue: Queue, connection: redis.Redis) -> None:
    queue.add(queue.task("a", "k"))
    link = Link(connection)
    other = KeyedInbox(WorkerInbox(link, "other"), link)
    (answer,) = other.add(
        SPEC.model_copy(update={"name": "other"}), 1, "t.b", [queue.task("b", "k")]
    )
    assert isinstance(answer, bytes)


def test_keys_of_two_client_names_differ(queue: Queue) -> None:
    queue.add(queue.task("a", "k"))
    own = queue.task("a", "k", "y")
    stranger = own._replace(key=own.key._replace(name=own.key.name.replace("t:", "u:")))
    (answer,) = queue.keyed.add(SPEC, 1, "u.a", [stranger])
    assert isinstance(answer, bytes)


def test_a_record_tells_only_clients_of_its_name(queue: Queue) -> None:
    task = queue.task("a", "k")
    queue.add(task)
    held = msgpack.unpackb(queue.redis.get(queue.record(task)) or b"", raw=True)
    changed = packed({**held, b"waiters": [b"u.b-1", b"tt.b-1", 7, b"t.b", b"t.c-1", b"t.b-1"]})
    assert queue.redis.set(queue.record(task), changed, keepttl=True)
    queue.redis.set(keys.reply("t.c"), "no list")
    queue.settle(queue.inbox.claim("w", 9).entries[0], "engine_failed")
    assert queue.told("t.b") == {"t.b-1": ["t.a-1"]}
    assert [queue.redis.exists(keys.reply(client)) for client in ("u.b", "tt.b")] == [0, 0]


@pytest.mark.parametrize(
    "spoiled",
    [
        b"",
        b"garbage",
        packed({}),
        packed([1, 2]),
        packed({"task": "t.a-1", "entry": 5, "waiters": [], "until_ms": 1, "expires_ms": 1}),
        packed({"task": "t", "entry": "1:1-1", "waiters": [], "until_ms": -1, "expires_ms": 1}),
        packed({"task": "t", "entry": "1:1-1", "waiters": 5, "until_ms": 1, "expires_ms": 1}),
        None,
    ],
)
def test_whatever_a_client_writes_into_a_record_others_are_answered(
    queue: Queue, spoiled: bytes | None
) -> None:
    task = queue.task("a", "k")
    queue.add(task)
    if spoiled is None:
        queue.redis.delete(queue.record(task))
        queue.redis.rpush(queue.record(task), "x")
    else:
        queue.redis.set(queue.record(task), spoiled)
    queue.settle(queue.inbox.claim("w", 9).entries[0], "engine_failed")
    assert queue.inbox.look()[:5] == (0, 0, 0, 0, 0)
    if spoiled is not None:
        assert isinstance(queue.add(queue.task("b", "k")), bytes)


def test_a_large_task_keeps_its_key(queue: Queue) -> None:
    task = queue.task("a", "k")
    roomy = SPEC.model_copy(update={"queue_max_bytes": 1 << 20})
    queue.keyed.add(roomy, 1, "t.a", [task._replace(frame=task.frame + bytes(SCRIPT_BYTES))])
    (entry,) = queue.inbox.claim("w", 9).entries
    assert entry.key == task.key.name


def test_an_entry_deleted_unclaimed_is_missed_once_a_later_one_is_claimed(queue: Queue) -> None:
    lost = queue.add(queue.task("a", "k"))
    queue.add(queue.task("a", "later"))
    queue.redis.xdel(queue.inbox.keys.normal, lost)
    early = queue.task("b", "k")
    assert queue.add(early) == Repeated("t.a-1", None)
    (later,) = queue.inbox.claim("w", 9).entries
    again = queue.task("c", "k")
    assert isinstance(queue.add(again), bytes)
    queue.settle(later, "engine_failed")
    queue.settle(queue.inbox.claim("w", 9).entries[0], "engine_failed")
    assert queue.told_of(early) == [again.task_id]


def test_a_requeued_task_has_no_key(queue: Queue) -> None:
    task = queue.task("a", "k")
    queue.add(task)
    queue.redis.hset(keys.MODELS, "m", SPEC.model_dump_json())
    (entry,) = queue.inbox.claim("w", 9).entries
    settlements = intake_of_m().admit([entry._replace(deliveries=9)], 0).settlements
    queue.inbox.settle(settlements)
    letters = DeadLetters(queue.redis, "m")
    (letter,) = letters.letters()
    letters.requeue(letter)
    (requeued,) = queue.inbox.claim("w", 9).entries
    assert requeued.key == ""
    queue.settle(requeued, "engine_failed")
    answer = queue.add(queue.task("b", "k"))
    assert isinstance(answer, Repeated)
    assert answer.task_id == task.task_id


def test_a_task_on_which_the_engine_hung_keeps_its_key(queue: Queue) -> None:
    queue.add(queue.task("a", "k"))
    (entry,) = queue.inbox.claim("w", 9).entries
    intake = intake_of_m()
    (held,) = intake.admit([entry], 0).held
    assert isinstance(held, Held)
    queue.inbox.settle([intake.timed_out(held, BatchTimeout("hung"))])
    assert isinstance(queue.add(queue.task("b", "k")), Repeated)


def test_other_inputs_under_a_key_conflict(queue: Queue) -> None:
    queue.add(queue.task("a", "k", "x"))
    answer = queue.add(queue.task("b", "k", "y"))
    assert isinstance(answer, KeyConflict)
    assert "t.a-1" in answer.message
    queue.settle(queue.inbox.claim("w", 9).entries[0], "engine_failed")
    assert isinstance(queue.add(queue.task("b", "k", "y")), KeyConflict)


def test_one_call_may_hold_a_key_twice_and_be_repeated(queue: Queue) -> None:
    tasks = [queue.task("a", "k"), queue.task("a", "other"), queue.task("a", "k")]
    answers = queue.keyed.add(SPEC, 1, "t.a", tasks)
    assert answers[2] == Repeated("t.a-1", None)
    assert queue.keyed.add(SPEC, 1, "t.a", tasks) == answers
    assert queue.inbox.look().normal == 2


def test_waiters_are_bounded_and_a_retry_is_no_new_one(queue: Queue) -> None:
    queue.add(queue.task("a", "k"))
    waiting = [queue.task("b", "k") for _ in range(MOST_WAITERS)]
    for task in waiting:
        assert queue.add(task) == Repeated("t.a-1", None)
    assert isinstance(queue.add(queue.task("b", "k")), QueueFull)
    assert queue.add(waiting[0]) == Repeated("t.a-1", None)


def test_a_full_queue_takes_no_key(queue: Queue) -> None:
    for number in range(5):
        queue.add(queue.task("a", f"fill{number}", rows=4))
    refused = queue.task("a", "k", rows=4)
    assert queue.add(refused) is None
    assert queue.redis.exists(queue.record(refused)) == 0
    assert isinstance(queue.add(queue.task("b", "fill0", rows=4)), KeyConflict | Repeated)


def test_repeats_take_nothing_from_a_rate_limit(queue: Queue) -> None:
    limit = RateLimit(rows_per_s=0.001, burst_rows=1)
    queue.inbox.attend("w", 5000, limit)
    assert isinstance(queue.add(queue.task("a", "k")), bytes)
    assert queue.add(queue.task("b", "k")) == Repeated("t.a-1", None)
    limited = queue.task("b", "other")
    wait_ms = queue.add(limited)
    assert isinstance(wait_ms, int)
    assert 990_000 < wait_ms <= 1_000_000
    assert queue.redis.exists(queue.record(limited)) == 0


def test_cancelling_frees_the_key_unless_others_wait(queue: Queue) -> None:
    first = queue.task("a", "k")
    entry_id = queue.add(first, 2)
    assert isinstance(entry_id, bytes)
    waiter = queue.task("b", "k")
    queue.add(waiter)
    assert queue.cancel(first, 2, entry_id) == -2
    queue.settle(queue.inbox.claim("w", 9).entries[0], "engine_failed")
    task = queue.task("a", "free", rows=3)
    alone = queue.add(task)
    assert isinstance(alone, bytes)
    assert queue.cancel(task, 1, alone) == 1
    assert isinstance(queue.add(queue.task("b", "free", rows=3)), bytes)
    assert queue.inbox.look().rows == 3


def test_a_cancelled_task_that_a_worker_holds_frees_its_key_when_it_ends(queue: Queue) -> None:
    task = queue.task("a", "k")
    entry_id = queue.add(task)
    assert isinstance(entry_id, bytes)
    (held,) = queue.inbox.claim("w", 9).entries
    assert queue.cancel(task, 1, entry_id) == 0
    assert isinstance(queue.add(queue.task("b", "k", content="y")), KeyConflict)
    assert queue.inbox.claim("w", 0).cancelled == {(1, entry_id)}
    queue.settle(held, "cancelled", frees_key=True)
    assert isinstance(queue.add(queue.task("c", "k", content="y")), bytes)


def test_a_running_task_that_was_cancelled_keeps_its_outcome(queue: Queue) -> None:
    task = queue.task("a", "k")
    entry_id = queue.add(task)
    assert isinstance(entry_id, bytes)
    (held,) = queue.inbox.claim("w", 9).entries
    assert queue.cancel(task, 1, entry_id) == 0
    reply = queue.settle(held, "ran to its end")
    assert queue.add(queue.task("b", "k")) == Repeated(task.task_id, reply)


def test_a_repeat_takes_back_the_cancelling_of_what_a_worker_holds(queue: Queue) -> None:
    task = queue.task("a", "k")
    entry_id = queue.add(task)
    assert isinstance(entry_id, bytes)
    (held,) = queue.inbox.claim("w", 9).entries
    assert queue.cancel(task, 1, entry_id) == 0
    again = queue.task("b", "k")
    assert queue.add(again) == Repeated(task.task_id, None)
    assert queue.inbox.claim("w", 0).cancelled == frozenset()
    assert queue.cancel(task, 1, entry_id) == -2
    queue.settle(held, "ran to its end")
    assert queue.told_of(again) == [task.task_id]


def test_a_lost_task_and_a_lost_outcome_are_run_again(queue: Queue) -> None:
    queue.add(queue.task("a", "k"))
    waiter = queue.task("b", "k")
    queue.add(waiter)
    queue.redis.delete(queue.inbox.keys.normal)
    again = queue.task("c", "k")
    assert isinstance(queue.add(again), bytes)
    queue.settle(queue.inbox.claim("w", 9).entries[0], "engine_failed")
    assert queue.told_of(waiter) == [again.task_id]
    queue.redis.delete(keys.result(again.task_id))
    assert isinstance(queue.add(queue.task("d", "k")), bytes)
    assert queue.add(waiter) == Repeated("t.d-1", None)


def test_purged_tasks_free_their_keys_and_tell_who_waits(queue: Queue) -> None:
    queue.add(queue.task("a", "k"))
    waiter = queue.task("b", "k")
    queue.add(waiter)
    assert purge(queue.redis, "m") == 1
    assert queue.told_of(waiter) == ["t.a-1"]
    assert queue.redis.exists(keys.result("t.a-1"))
    assert isinstance(queue.add(queue.task("c", "k")), bytes)


def test_a_full_redis_writes_nothing_of_a_keyed_task(queue: Queue) -> None:
    queue.add(queue.task("a", "old"))
    reply = queue.settle(queue.inbox.claim("w", 9).entries[0], "engine_failed")
    before = set(queue.redis.keys())
    queue.redis.config_set("maxmemory-policy", "noeviction")
    queue.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            queue.add(queue.task("a", "new"))
        assert queue.add(queue.task("b", "old")) == Repeated("t.a-1", reply)
        assert set(queue.redis.keys()) == before
    finally:
        queue.redis.config_set("maxmemory", 0)


def test_a_keyed_task_is_settled_at_maxmemory(queue: Queue) -> None:
    queue.add(queue.task("a", "k"))
    waiter = queue.task("b", "k")
    queue.add(waiter)
    queue.redis.config_set("maxmemory-policy", "noeviction")
    queue.redis.config_set("maxmemory", 1)
    try:
        (entry,) = queue.inbox.enter("w", 9).entries
        reply = queue.settle(entry, "engine_failed")
    finally:
        queue.redis.config_set("maxmemory", 0)
    assert queue.told_of(waiter) == ["t.a-1"]
    assert queue.add(queue.task("c", "k")) == Repeated("t.a-1", reply)


def test_an_entry_whose_digest_is_none_is_settled(queue: Queue) -> None:
    queue.inbox.ensure_groups()
    task = queue.task("a", "k")
    queue.redis.xadd(queue.inbox.keys.normal, {b"d": task.frame, b"k": b"../../x"})
    (entry,) = queue.inbox.claim("w", 9).entries
    assert entry.key == ""
    queue.settle(entry, "engine_failed")
    assert queue.inbox.look().normal == 0


@pytest.mark.parametrize(
    ("frame", "deliveries", "waited_ms", "code", "frees"),
    [
        (None, 0, 10_000, "deadline_exceeded", True),
        (None, 9, 0, "poison_task", False),
        (b"\x93\x01\xa5t.a-1\x07", 0, 0, "corrupt_message", True),
    ],
)
def test_what_was_not_run_frees_its_key(
    queue: Queue, frame: bytes | None, deliveries: int, waited_ms: int, code: str, frees: bool
) -> None:
    task = queue.task("a", "k")
    body = InferenceTask("t.a-1", 1, (Tensor("x", "uint8", (1, 1), b"x"),), None, 5000, 600)
    queue.add(task._replace(frame=frame or encode_task(body)))
    waiter = queue.task("b", "k")
    queue.add(waiter)
    (entry,) = queue.inbox.claim("w", 9).entries
    intake = intake_of_m()
    now_ms = int(entry.entry_id.partition(b"-")[0]) + waited_ms
    admitted = intake.admit([entry._replace(deliveries=deliveries)], now_ms)
    queue.inbox.settle(admitted.settlements)
    (reply,) = decode_replies(queue.redis.get(keys.result("t.a-1")) or b"")
    assert reply.error_code == code
    assert queue.told_of(waiter) == ["t.a-1"]
    again = queue.add(queue.task("c", "k"))
    assert isinstance(again, bytes if frees else Repeated)


@pytest.mark.parametrize("key", ["", None, 3])
def test_a_key_is_a_text(key: str) -> None:
    with pytest.raises(InvalidInput):
        task_key("t", key, 10, 10, ())


@pytest.mark.parametrize("window_s", [0, -1, float("nan"), float("inf")])
def test_a_window_is_a_finite_time(window_s: float) -> None:
    with pytest.raises(InvalidInput):
        task_key("t", "k", window_s, 10, ())


def test_the_content_of_a_key_is_all_of_the_inputs() -> None:
    base = (Tensor("a", "uint8", (1, 2), b"ab"), Tensor("b", "uint8", (1, 1), b"c"))
    others = [
        (base[0]._replace(data=b"ax"), base[1]),
        (base[0]._replace(name="z"), base[1]),
        (base[0]._replace(dtype="int8"), base[1]),
        (base[0]._replace(shape=(2, 1)), base[1]),
        (Tensor("a", "uint8", (1, 1), b"a"), Tensor("b", "uint8", (1, 2), b"bc")),
        base[:1],
    ]
    contents = {task_key("t", "k", 10, 10, tensors).content for tensors in (base, *others)}
    assert len(contents) == len(others) + 1
    assert task_key("t", "k", 10, 10, base) == task_key("t", "k", 10, 10, tuple(base))
    assert task_key("t", "k", 10, 10, base).pending_ms > task_key("t", "k", 10, 10, base).window_ms


@dataclass
class Key:
    """The model of one record."""

    content: str
    task_id: str
    entry: tuple[int, bytes]
    reply: bytes | None = None
    window_over: bool = False
    waiters: list[KeyedTask] = field(default_factory=list)


class KeyMachine(RuleBasedStateMachine):
    """A dictionary of keys says what each submit must be answered, and who is told of each end."""

    connection: redis.Redis
    link: Link
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.connection.flushdb()
        self.queue = Queue(self.connection, self.link)
        self.known: dict[str, Key] = {}
        #: Entries in the queue, whether their key still stands for them or not.
        self.open: dict[tuple[int, bytes], KeyedTask] = {}
        self.claimed: dict[tuple[int, bytes], Entry] = {}
        #: Claimed entries whose senders want them no more.
        self.marked: set[tuple[int, bytes]] = set()
        self.expected: dict[str, list[str]] = {}
        self.sent: list[tuple[str, KeyedTask, int]] = []

    submits = Bundle("submits")

    def _check(self, key: str, content: str, task: KeyedTask, priority: int) -> None:
        answer = self.queue.add(task, priority)
        known = self.known.get(key)
        if known is None:
            if len(self.open) >= SPEC.queue_max_rows:
                assert answer is None
                return
            assert isinstance(answer, bytes)
            entry = (priority, answer)
            self.known[key] = Key(content, task.task_id, entry)
            self.open[entry] = task
            return
        if known.content != content:
            assert isinstance(answer, KeyConflict)
        elif known.reply is not None:
            assert answer == Repeated(known.task_id, known.reply)
        elif known.task_id == task.task_id:
            assert answer == known.entry[1]
        elif task in known.waiters:
            assert answer == Repeated(known.task_id, None)
        elif len(known.waiters) >= MOST_WAITERS:
            assert isinstance(answer, QueueFull)
        else:
            assert answer == Repeated(known.task_id, None)
            known.waiters.append(task)
            self.marked.discard(known.entry)

    @rule(
        target=submits,
        client=st.sampled_from("ab"),
        key=st.sampled_from("xyz"),
        content=st.sampled_from("0001"),
        priority=st.integers(0, 2),
    )
    def submit(self, client: str, key: str, content: str, priority: int) -> object:
        task = self.queue.task(client, key, content)
        self._check(key, content, task, priority)
        return (key, content, task, priority)

    @rule(submit=submits)
    def retry(self, submit: tuple[str, str, KeyedTask, int]) -> None:
        """The answer was lost on its way: the client sends the same task again."""
        key, content, task, priority = submit
        known = self.known.get(key)
        standing = known is not None and (known.task_id == task.task_id or task in known.waiters)
        if standing:
            self._check(key, content, task, priority)

    @rule(count=st.integers(1, 3))
    def claim(self, count: int) -> None:
        for entry in self.queue.inbox.claim("w", count).entries:
            self.claimed[entry.stream, entry.entry_id] = entry

    def _end(self, place: tuple[int, bytes], reply: bytes | None, *, holds: bool) -> None:
        task_id = self.open.pop(place).task_id
        self.marked.discard(place)
        for key, known in list(self.known.items()):
            if known.entry == place and known.reply is None:
                for waiter in known.waiters:
                    self.expected.setdefault(waiter.task_id, []).append(task_id)
                known.waiters = []
                if holds and not known.window_over:
                    known.reply = reply
                else:
                    del self.known[key]

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), frees=st.booleans())
    def settle(self, data: st.DataObject, frees: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.claimed)))
        entry = self.claimed.pop(place)
        reply = self.queue.settle(entry, f"end of {place[1]!r}", frees_key=frees)
        self._end(place, reply, holds=not frees)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.open)))
        key = next((k for k, known in self.known.items() if known.entry == place), None)
        shared = key is not None and bool(self.known[key].waiters)
        answer = self.queue.cancel(self.open[place], *place)
        if shared:
            assert answer == -2
            return
        if place in self.claimed:
            assert answer == 0
            self.marked.add(place)
            return
        assert answer == 1
        if key is not None:
            del self.known[key]
        del self.open[place]

    @rule()
    def purge(self) -> None:
        waiting = [place for place in self.open if place not in self.claimed]
        with redis.Redis.from_url(self.url, protocol=2) as own:
            assert purge(own, "m") == len(waiting)
        for place in waiting:
            self._end(place, None, holds=False)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def window_ends(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.known)))
        record = keys.record("m", key_name(key))
        if self.known[key].reply is not None:
            # What Redis does by itself when the record's time has come.
            assert self.connection.delete(record) == 1
            del self.known[key]
        else:
            held = msgpack.unpackb(self.connection.get(record) or b"", raw=True)
            changed = packed({**held, b"until_ms": 1})
            assert self.connection.set(record, changed, keepttl=True)
            self.known[key].window_over = True

    @precondition(lambda self: any(k.reply is not None for k in self.known.values()))
    @rule(data=st.data())
    def outcome_is_lost(self, data: st.DataObject) -> None:
        ended = sorted(key for key, known in self.known.items() if known.reply is not None)
        known = self.known[data.draw(st.sampled_from(ended))]
        assert self.connection.delete(keys.result(known.task_id)) == 1
        content = known.content
        key = next(name for name, one in self.known.items() if one is known)
        del self.known[key]
        for client in "ab" if len(self.open) < SPEC.queue_max_rows else ():
            self._check(key, content, self.queue.task(client, key, content), 1)

    @invariant()
    def everyone_who_waited_was_told_once(self) -> None:
        told = self.queue.told("t.a") | self.queue.told("t.b")
        assert told == self.expected

    @invariant()
    def workers_see_what_is_not_wanted(self) -> None:
        assert self.queue.inbox.claim("w", 0).cancelled == self.marked

    @invariant()
    def what_a_key_leaves_behind_expires(self) -> None:
        records = self.connection.keys(keys.record("m", "*"))
        assert len(records) <= len("xyz")
        assert all(self.connection.pttl(record) > 0 for record in records)
        assert self.queue.inbox.look().rows == len(self.open)


def test_any_order_of_submits_and_ends(connection: redis.Redis, redis_url: str) -> None:
    members = {"connection": connection, "link": Link(connection), "url": redis_url}
    machine = type("Machine", (KeyMachine,), members)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
