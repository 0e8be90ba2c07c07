"""The queue on a real Redis: bell rule, claims, leases, settling once, cancelling, limits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from producer import keys
from producer.entries import Entry, Reclaim, Settled, Settlement
from producer.inbox import BELL_TTL_MS
from producer.letters import encode_letter
from producer.link import Link
from producer.task import Reply
from producer.wire import decode_replies, encode_reply
from tests.support.processes import until
from tests.support.specs import SPEC
from workers.inbox import SCRIPT_BYTES, TURN_LEASE_MS, WorkerInbox
from workers.metrics import Counters
from workers.presence import Presence

LETTER = encode_letter("c-1", "poison_task", "killed", 1, 1, 4, ["w1"], b"1-0", 1)


class Adder:
    """Adds tasks as a client does, each call a flush of its own."""

    def __init__(self, inbox: WorkerInbox) -> None:
        self.inbox = inbox
        self.flush = 0
        self.spec = SPEC

    def allow(self, **limits: int) -> None:
        """Other limits for what follows."""
        self.spec = SPEC.model_copy(update=limits)

    def __call__(
        self, frames: Sequence[bytes], priority: int = 1, rows: int = 1
    ) -> tuple[bool, list[bytes | None]]:
        self.flush += 1
        return self.inbox.add(self.spec, priority, "c", self.flush, [(rows, f) for f in frames])


@pytest.fixture
def inbox(connection: redis.Redis) -> WorkerInbox:
    return WorkerInbox(Link(connection), "m")


@pytest.fixture
def add(inbox: WorkerInbox) -> Adder:
    return Adder(inbox)


def answer(entry: Entry, text: bytes = b"r") -> Settlement:
    return Settlement(entry, entry.rows, "c", text)


def replies(connection: redis.Redis) -> list[bytes]:
    return connection.lrange(keys.reply("c"), 0, -1)


def test_the_first_work_rings_and_more_does_not(inbox: WorkerInbox, add: Adder) -> None:
    ring, ids = add([b"a", b"b"])
    assert ring
    assert len(ids) == 2
    assert add([b"c"])[0] is False
    state = inbox.look()
    assert (state.normal, state.rows, state.bytes, state.bells) == (3, 3, 3, 1)


def test_a_running_turn_covers_and_an_ended_one_does_not(inbox: WorkerInbox, add: Adder) -> None:
    inbox.enter("w")
    assert add([b"a"])[0] is False
    assert inbox.leave("w") is True
    assert inbox.look().bells == 1
    assert add([b"b"])[0] is False


def test_a_turn_that_left_nothing_does_not_ring(inbox: WorkerInbox, add: Adder) -> None:
    inbox.enter("w")
    add([b"a"])
    inbox.claim("w", 10)
    assert inbox.leave("w") is False


def test_more_work_than_a_worker_holds_rings_for_another(inbox: WorkerInbox, add: Adder) -> None:
    inbox.attend("w1", 5000)
    inbox.attend("w2", 5000)
    inbox.enter("w1")
    assert add([b"a"] * 8)[0] is False
    assert add([b"b"])[0] is True
    assert add([b"c"])[0] is False


def test_a_lost_bell_is_healed_when_it_is_old(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    add([b"a"])
    assert inbox.heal(1000) is False
    (bell,) = connection.zrange(inbox.keys.bells, 0, -1)
    connection.zadd(inbox.keys.bells, {bell: redis_ms(connection) - 1})
    assert inbox.heal(1000) is True
    assert inbox.heal(1000) is False
    assert BELL_TTL_MS <= 1000


def test_large_tasks_are_claimed_in_the_same_order_as_small_ones(
    inbox: WorkerInbox, add: Adder
) -> None:
    def frame(mark: bytes) -> bytes:
        return mark * SCRIPT_BYTES

    add.allow(queue_max_bytes=100 * SCRIPT_BYTES)
    add([frame(b"l"), frame(b"m")], priority=2)
    add([frame(b"n")], priority=1)
    add([frame(b"h"), frame(b"i"), frame(b"j")], priority=0)
    firsts = [
        [entry.frame[:1] for entry in inbox.claim("w", count, first).entries if entry.frame]
        for count, first in ((2, 0), (1, 2), (9, 0), (9, 0))
    ]
    assert firsts == [[b"h", b"i"], [b"l"], [b"j", b"n", b"m"], []]
    assert inbox.look().claimed == 6


def test_a_few_large_tasks_are_claimed_by_rows_too(inbox: WorkerInbox, add: Adder) -> None:
    add.allow(queue_max_bytes=100 * SCRIPT_BYTES, queue_max_rows=100)
    for _ in range(4):
        add([b"x" * SCRIPT_BYTES], rows=8)
    assert [entry.rows for entry in inbox.claim("w", 16).entries] == [8, 8]
    assert len(inbox.enter("w", 64).entries) == 2


def redis_ms(connection: redis.Redis) -> int:
    seconds, micros = connection.time()
    return int(seconds) * 1000 + int(micros) // 1000


def test_a_dead_workers_entries_are_healed(inbox: WorkerInbox, add: Adder) -> None:
    add([b"a"])
    inbox.enter("dead")
    inbox.claim("dead", 1)
    inbox.leave("dead")
    assert inbox.heal(60_000) is False
    assert until(lambda: inbox.heal(1))


def test_claims_go_by_priority(inbox: WorkerInbox, add: Adder) -> None:
    add([b"low"], 2)
    add([b"normal"], 1)
    add([b"high1", b"high2"], 0)
    assert [e.frame for e in inbox.claim("w", 3).entries] == [b"high1", b"high2", b"normal"]
    assert [e.frame for e in inbox.claim("w", 3).entries] == [b"low"]
    add([b"high3"], 0)
    add([b"low2"], 2)
    assert [e.frame for e in inbox.claim("w", 1, first=2).entries] == [b"low2"]


def test_waiting_claims_and_heals_a_missing_group(inbox: WorkerInbox, add: Adder) -> None:
    assert inbox.wait("w", 4, 1) == []
    add([b"abc"], rows=3)
    (entry,) = inbox.wait("w", 4, 1000)
    assert (entry.stream, entry.frame, entry.rows) == (1, b"abc", 3)


def test_the_same_flush_twice_adds_once(inbox: WorkerInbox) -> None:
    first = inbox.add(SPEC, 1, "c", 7, [(1, b"a")])
    again = inbox.add(SPEC, 1, "c", 7, [(1, b"a")])
    assert again == (False, first[1])
    assert inbox.look().normal == 1
    inbox.add(SPEC, 0, "c", 7, [(1, b"a")])
    assert inbox.look()[:2] == (1, 1)


def test_limits_of_rows_and_bytes(inbox: WorkerInbox, add: Adder) -> None:
    _, ids = add([b"a"] * 6, rows=4)
    assert [entry_id is not None for entry_id in ids] == [True] * 5 + [False]
    entries = inbox.claim("w", 20).entries
    inbox.settle([answer(entry) for entry in entries])
    assert inbox.look().rows == 0
    _, ids = add([b"x" * 600, b"y" * 600, b"z"])
    assert [entry_id is not None for entry_id in ids] == [True, False, True]


def test_settling_answers_once(inbox: WorkerInbox, add: Adder, connection: redis.Redis) -> None:
    add([b"a", b"b"])
    entries = inbox.claim("w", 10).entries
    assert inbox.settle([answer(e, b"<%s>" % (e.frame or b"")) for e in entries]) == Settled(2)
    assert inbox.settle([answer(e, b"again") for e in entries]) == Settled(0, (0, 1))
    assert replies(connection) == [b"<a><b>"]
    assert connection.ttl(keys.reply("c")) > 0
    assert inbox.look()[:6] == (0, 0, 0, 0, 0, 0)


def test_settling_stores_and_keeps_the_dead(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    add([b"a"])
    (entry,) = inbox.claim("w", 10).entries
    inbox.settle([Settlement(entry, 1, None, b"r", "trtq:result:c-1", 60, LETTER)])
    assert connection.get("trtq:result:c-1") == b"r"
    assert connection.ttl("trtq:result:c-1") > 0
    assert inbox.look().dead == 1
    assert replies(connection) == []


@pytest.mark.parametrize("fields", [{"d": b""}, {"other": b"x"}, {"d": b"a", "r": b"0"}])
def test_an_entry_of_no_bytes_or_rows_ends_like_any_other(
    inbox: WorkerInbox, connection: redis.Redis, fields: dict[str, bytes]
) -> None:
    inbox.ensure_groups()
    first, second, third = (connection.xadd(inbox.keys.normal, fields) for _ in range(3))
    (entry,) = inbox.enter("w", 1).entries
    assert entry.entry_id == first
    assert inbox.settle([answer(entry)]) == Settled(1)
    assert inbox.cancel(1, second, 0, 0) == 1
    assert inbox.purge() == ([fields["d"]] if "d" in fields else [], [])
    assert not connection.exists(inbox.keys.normal) or not connection.xlen(inbox.keys.normal)
    assert third != second


def test_a_client_that_spoils_its_reply_key_costs_others_no_answer(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    add([b"a", b"b"])
    mine, other = inbox.claim("w", 2).entries
    connection.set(keys.reply("spoiler"), "no list")
    done = [answer(mine), answer(other)._replace(client="spoiler")]
    assert inbox.settle(done) == Settled(2)
    assert replies(connection) == [b"r"]
    assert connection.lrange(keys.reply("spoiler"), 0, -1) == [b"r"]


def test_a_stream_that_somebody_else_made_is_claimed_too(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    connection.xadd(inbox.keys.high, {"d": b"foreign"})
    assert inbox.look().high == 1
    connection.delete(inbox.keys.high)
    connection.xadd(inbox.keys.high, {"d": b"foreign"})
    add([b"a"])
    frames = [entry.frame for entry in inbox.enter("w", 2).entries]
    assert frames == [b"foreign", b"a"]


def test_a_late_worker_cannot_answer_twice(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    add([b"a"])
    (late,) = inbox.claim("late", 1).entries
    (taken,) = until(lambda: inbox.reclaim("other", 1, 10, 3, False).entries)
    assert taken.deliveries == 1
    assert inbox.renew("late", [late]) == {(1, late.entry_id)}
    assert inbox.renew("other", [taken]) == frozenset()
    assert inbox.settle([answer(late, b"late")]) == Settled(1)
    assert inbox.settle([answer(taken, b"other")]) == Settled(0, (0,))
    assert replies(connection) == [b"late"]


def test_suspects_come_one_at_a_time(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    _, ids = add([b"a", b"b"])

    def reclaim(consumer: str, holder: str, suspects: bool) -> Reclaim:
        """After the leases of all that `holder` has ran out."""
        connection.xclaim(inbox.keys.normal, keys.GROUP, holder, 0, ids, idle=20_000, justid=True)
        return inbox.reclaim(consumer, 10_000, 10, 3, suspects)

    inbox.claim("w0", 10)
    for number in range(1, 3):
        assert len(reclaim(f"w{number}", f"w{number - 1}", False).entries) == 2
    assert reclaim("w3", "w2", False) == ([], True)
    (suspect,) = reclaim("w3", "w2", True).entries
    assert suspect.deliveries == 3
    (other,) = inbox.reclaim("w4", 10_000, 10, 3, True).entries
    assert other.entry_id != suspect.entry_id
    inbox.settle([answer(suspect), answer(other)])
    assert inbox.reclaim("w5", 0, 10, 3, False) == ([], False)


def test_released_entries_come_back_at_once_uncounted(inbox: WorkerInbox, add: Adder) -> None:
    add([b"a", b"b"])
    inbox.enter("w")
    entry, _ = inbox.claim("w", 2).entries
    assert inbox.look().claimed == 2
    assert inbox.release("w", [entry], 10_000) == 1
    assert (inbox.look().bells, inbox.look().normal) == (1, 2)
    assert inbox.look().claimed == 1, "what was handed back waits"
    (again,) = inbox.reclaim("x", 10_000, 10, 3, False).entries
    assert again.deliveries == 0
    assert inbox.release("w", [again], 10_000) == 0


def test_a_cancellation_mark_that_is_none_stops_no_claim(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    _, (entry_id,) = add([b"a"])
    connection.zadd(inbox.keys.cancelled, {b"no mark": 1e15, b"1:" + (entry_id or b""): 1e15})
    claim = inbox.claim("w", 5)
    assert [entry.frame for entry in claim.entries] == [b"a"]
    assert claim.cancelled == {(1, entry_id)}


def test_cancel_before_and_after_the_claim(inbox: WorkerInbox, add: Adder) -> None:
    _, ids = add([b"a", b"b"])
    first, second = ids
    assert first is not None
    assert second is not None
    assert inbox.cancel(1, first, 1, 1) == 1
    assert inbox.cancel(1, first, 1, 1) == -1
    (entry,) = inbox.claim("w", 5).entries
    assert entry.frame == b"b"
    assert inbox.cancel(1, second, 1, 1) == 0
    assert inbox.claim("w", 5).cancelled == {(1, second)}
    inbox.settle([answer(entry)])
    assert inbox.claim("w", 5).cancelled == frozenset()
    assert inbox.look().rows == 0


def test_purge_takes_what_nobody_holds(inbox: WorkerInbox, add: Adder) -> None:
    add([b"held"])
    inbox.claim("w", 1)
    add([b"a"], 0, rows=2)
    add([b"b"], 2)
    assert inbox.purge() == ([b"a", b"b"], [])
    assert (inbox.look().rows, inbox.look().claimed) == (1, 1)


def test_presence(inbox: WorkerInbox) -> None:
    inbox.attend("w", 5000)
    inbox.ensure_groups()
    assert inbox.look().workers == 1
    inbox.absent("w")
    assert inbox.look().workers == 0
    assert TURN_LEASE_MS > 1000


def consumers(inbox: WorkerInbox, connection: redis.Redis) -> set[str]:
    stream = inbox.keys.streams[1]
    return {found["name"].decode() for found in connection.xinfo_consumers(stream, keys.GROUP)}


def test_consumers_of_dead_workers_are_swept_once_they_hold_nothing(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    add([b"a", b"b", b"c"])
    for worker in ("lives", "dies", "dies holding"):
        inbox.attend(worker, 60_000)
        (entry,) = inbox.enter(worker, 1).entries
        if worker != "dies holding":
            inbox.settle([answer(entry)])
    assert inbox.sweep() == 0
    connection.zadd(inbox.keys.workers, {"dies": 1, "dies holding": 1})
    assert inbox.sweep() == 1
    assert consumers(inbox, connection) == {"lives", "dies holding"}
    (taken,) = inbox.reclaim("lives", 0, 1, 9, False).entries
    assert taken.frame == b"c"
    inbox.settle([answer(taken)])
    assert inbox.sweep() == 1
    assert consumers(inbox, connection) == {"lives"}


def test_a_live_worker_that_was_swept_works_on(
    inbox: WorkerInbox, add: Adder, connection: redis.Redis
) -> None:
    inbox.ensure_groups()
    add([b"before"])
    inbox.settle([answer(entry) for entry in inbox.claim("w", 1).entries])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(inbox.wait, "w", 1, 10_000)
        until(lambda: connection.info("clients")["blocked_clients"])
        assert inbox.sweep() == 1
        add([b"a"])
        (entry,) = waiting.result(10)
    assert inbox.renew("w", [entry]) == frozenset()
    assert inbox.release("w", [entry], 10_000) == 1
    assert inbox.sweep() == 1
    (again,) = inbox.reclaim("w", 10_000, 1, 9, False).entries
    assert inbox.sweep() == 1  # "released", which holds nothing now
    assert inbox.release("w", [again], 10_000) == 1


def test_a_heartbeat_sweeps(inbox: WorkerInbox, add: Adder, connection: redis.Redis) -> None:
    add([b"a"])
    inbox.settle([answer(entry) for entry in inbox.enter("died", 1).entries])
    assert consumers(inbox, connection) == {"died"}
    served = SimpleNamespace(rate_limit=None, spec=SPEC, inbox=inbox, counters=Counters())
    deaths: list[str] = []
    presence = Presence(connection, "w", {}, [served], 10_000, 0.01, deaths.append)
    presence.start()
    try:
        until(lambda: consumers(inbox, connection) == set())
    finally:
        presence.close()
    assert deaths == []


@pytest.mark.parametrize(("interval_s", "alive_ms"), [(1.0, 5000), (10.0, 30_000)])
def test_a_worker_counts_as_alive_for_longer_than_until_its_next_beats(
    inbox: WorkerInbox, connection: redis.Redis, interval_s: float, alive_ms: int
) -> None:
    served = SimpleNamespace(rate_limit=None, spec=SPEC, inbox=inbox, counters=Counters())
    presence = Presence(connection, "w", {}, [served], 10_000, interval_s, lambda _: None)
    presence.start()
    try:
        assert alive_ms - 2000 < connection.pttl(keys.worker("w")) <= alive_ms
        assert inbox.look().workers == 1
    finally:
        presence.close()


def test_a_claim_is_bounded_in_rows(inbox: WorkerInbox, add: Adder) -> None:
    add([b"a", b"b", b"c", b"d", b"e"], rows=4)
    assert len(inbox.enter("w", 8).entries) == 2
    assert len(inbox.claim("w", 1).entries) == 1
    assert len(inbox.claim("w", 100).entries) == 2


def test_renew_tells_streams_apart(inbox: WorkerInbox, connection: redis.Redis) -> None:
    inbox.ensure_groups()
    for stream in inbox.keys.streams[:2]:
        connection.xadd(stream, {b"d": b"frame"}, id="5-1")
    mine = inbox.enter("w", 2).entries
    assert [entry.entry_id for entry in mine] == [b"5-1", b"5-1"]
    inbox.settle([answer(mine[0])])
    assert inbox.renew("w", mine) == {(mine[0].stream, b"5-1")}


class QueueMachine(RuleBasedStateMachine):
    """Any order of adds, claims, crashes, releases and answers: each task is answered once, and
    uncovered work always rings."""

    connection: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.connection.flushdb()
        self.inbox = WorkerInbox(Link(self.connection), "m")
        self.adder = Adder(self.inbox)
        self.accepted: set[bytes] = set()
        self.rung = False
        self.in_turn: set[str] = set()
        self.number = 0

    claimed = Bundle("claimed")

    @rule(count=st.integers(1, 6), priority=st.integers(0, 2))
    def add_tasks(self, count: int, priority: int) -> None:
        frames = []
        for _ in range(count):
            self.number += 1
            frames.append(encode_reply(Reply(f"c-{self.number}", error_code="x")))
        ring, ids = self.adder(frames, priority)
        self.accepted |= {f for f, i in zip(frames, ids, strict=True) if i is not None}
        self.rung |= ring

    @rule(worker=st.sampled_from("ab"))
    def start_turn(self, worker: str) -> None:
        self.inbox.enter(worker)
        self.in_turn.add(worker)
        self.rung = self.inbox.look().bells > 0

    @rule(target=claimed, worker=st.sampled_from("ab"), count=st.integers(1, 4))
    def claim(self, worker: str, count: int) -> object:
        if worker not in self.in_turn:
            return multiple()
        return multiple(*((worker, e) for e in self.inbox.claim(worker, count).entries))

    @rule(item=consumes(claimed))
    def settle(self, item: tuple[str, Entry]) -> None:
        _, entry = item
        self.inbox.settle([answer(entry, entry.frame or b"")])

    @rule(item=consumes(claimed))
    def release(self, item: tuple[str, Entry]) -> None:
        worker, entry = item
        if self.inbox.release(worker, [entry], 10_000):
            self.rung = True

    @rule(target=claimed, worker=st.sampled_from("ab"))
    def reclaim(self, worker: str) -> object:
        if worker not in self.in_turn:
            return multiple()
        taken = self.inbox.reclaim(worker, 5000, 9, 99, False).entries
        return multiple(*((worker, entry) for entry in taken))

    @rule()
    def sweep(self) -> None:
        self.inbox.sweep()

    @rule(worker=st.sampled_from("ab"))
    def end_turn(self, worker: str) -> None:
        if worker in self.in_turn:
            self.in_turn.remove(worker)
            self.rung |= self.inbox.leave(worker)

    @invariant()
    def waiting_work_is_covered(self) -> None:
        pending, length = self.connection.xpending, self.connection.xlen
        streams = [name for name in self.inbox.keys.streams if length(name)]
        if any(length(name) > pending(name, keys.GROUP)["pending"] for name in streams):
            assert self.rung or self.in_turn

    def teardown(self) -> None:
        self.inbox.enter("last")
        for entry in self.inbox.claim("last", 1000).entries:
            self.inbox.settle([answer(entry, entry.frame or b"")])
        for entry in self.inbox.reclaim("last", 0, 1000, 99, False).entries:
            self.inbox.settle([answer(entry, entry.frame or b"")])
        answered = [r.task_id for blob in replies(self.connection) for r in decode_replies(blob)]
        assert len(answered) == len(set(answered)) == len(self.accepted)
        assert self.inbox.look()[:6] == (0, 0, 0, 0, 0, 0)


def test_replies_are_removed_once_however_late_the_call_arrives(
    connection: redis.Redis, inbox: WorkerInbox, add: Adder
) -> None:
    link = Link(connection)
    for frame in (b"one", b"two", b"three"):
        add([frame])
        (entry,) = inbox.enter("w", 1).entries
        inbox.settle([answer(entry, frame)])
    key = (keys.reply("c"),)
    assert link.script("replies", key, [b"", 0, 2]) == [b"one", b"two"]
    assert link.script("replies", key, [b"one", 2, 2]) == [b"three"]
    # The same call again, as a broken connection may deliver it: what is there now was not read.
    assert link.script("replies", key, [b"one", 2, 2]) == [b"three"]
    assert link.script("replies", key, [b"three", 1, 2]) == []
    assert link.script("replies", key, [b"three", 1, 2]) == []


def test_any_order_answers_once_and_rings(connection: redis.Redis) -> None:
    machine = type("Machine", (QueueMachine,), {"connection": connection})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )
