"""One model's queue: three streams, one consumer group, and the bell rule.

Every change is one script, so nothing is half done when a connection breaks, and every method
may be called again after an error without adding or answering anything twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import redis

from producer import keys
from producer.bell import bell_message
from producer.connection import LINK_ERRORS
from producer.entries import Claim as Claim
from producer.entries import Entry as Entry
from producer.entries import Reclaim as Reclaim
from producer.entries import (
    Settled,
    entry_of,
    known_key,
    known_mark,
    mark_of,
    milliseconds,
    reclaimed_entry,
)
from producer.keys import GROUP, PRIORITIES
from producer.letters import LetterLimits, old_letters
from producer.limits import RateLimit
from producer.link import Link
from producer.scripts import packed
from producer.spec import ModelSpec

log = logging.getLogger("trtq.inbox")

#: A bell older than this counts as lost. It costs that much time, never a task.
BELL_TTL_MS = 1000
#: A turn that did not renew itself for this long counts as dead.
TURN_LEASE_MS = 3000
#: How long a cancellation waits for the worker that holds its task.
CANCEL_MARK_MS = 600_000
#: How long a flush may be retried without being added twice.
SEEN_S = 120
#: Replies wait this long for a client that is gone or away.
REPLY_TTL_S = 600
#: Claims of more bytes are read by a command of their own: the script would copy each three times.
SCRIPT_BYTES = 64 << 10


class Settlement(NamedTuple):
    """One entry's end: who is told what, and what is kept."""

    entry: Entry
    rows: int
    client: str | None
    reply: bytes
    result_key: str = ""
    store_s: int = 0
    #: Fields of the dead letter to keep (see letters.py); its frame is added in Redis.
    letter: Sequence[str | bytes] = ()
    #: The task's id and tracing context, where its client traces it.
    trace: tuple[str, Mapping[str, str]] | None = None
    #: A task that ends without having been run frees its idempotency key.
    frees_key: bool = False


class QueueState(NamedTuple):
    """A look at one model's queue. Depths count entries, also those that a worker holds."""

    high: int
    normal: int
    low: int
    claimed: int
    rows: int
    bytes: int
    oldest_age_ms: int
    turns: int
    bells: int
    workers: int
    dead: int
    #: Age of the oldest task by priority, most urgent first; 0 where there is none.
    oldest_ages_ms: tuple[int, ...] = (0, 0, 0)


class Inbox:
    """The queue of one model. Methods raise redis-py's own errors."""

    def __init__(self, link: Link, model: str, letters: LetterLimits | None = None) -> None:
        self.model = model
        self._letters = packed(list(letters or LetterLimits()))
        self.keys = keys.model_keys(model)
        self._link = link
        self._queue = keys.bell_queue(model)
        self._bells: dict[str, bytes] = {}
        self._constants: dict[int, tuple[ModelSpec, str, bytes]] = {}

    def _bell(self, reason: str) -> bytes:
        message = self._bells.get(reason)
        if message is None:
            message = self._bells[reason] = bell_message(self.model, reason)
        return message

    def _script(self, name: str, script_keys: tuple[str, ...] | list[str], args: list[Any]) -> Any:
        try:
            return self._link.script(name, script_keys, args)
        except redis.exceptions.ResponseError as failure:
            if "NOGROUP" not in str(failure):
                raise
            # Somebody made a stream by a plain XADD: our own scripts make its group with it.
            self.ensure_groups()
            return self._link.script(name, script_keys, args)

    # The client's side.

    def add(
        self,
        spec: ModelSpec,
        priority: int,
        client: str,
        flush: int,
        tasks: Sequence[tuple[int, bytes]],
    ) -> tuple[bool, list[bytes | int | None]]:
        """Adds (rows, frame) pairs; returns (rang?, each pair's entry id).

        Instead of an id, None is a full queue, and a number the ms until a rate limit has room.

        `flush` numbers the client's calls for one stream: the same number again returns the
        first answer, so a call whose answer was lost can be repeated.
        """
        k = self.keys
        args = [self.add_constants(spec, client, priority), flush, self._bell("work")]
        args += [packed([rows for rows, _ in tasks]), *(frame for _, frame in tasks)]
        seen = keys.seen(self.model, PRIORITIES[priority], client)
        answer = self._link.script("add", (k.streams[priority], seen, *self.add_keys), args)
        return bool(answer[0]), answer[1:]

    @property
    def add_keys(self) -> tuple[str, ...]:
        """The keys that every script that adds tasks works on."""
        k = self.keys
        return (k.bells, k.turns, k.workers, self._queue, k.load, k.limits)

    def add_constants(self, spec: ModelSpec, client: str, priority: int) -> bytes:
        """What such a script is told each time, as the one argument that `lua/_add.lua` reads."""
        known = self._constants.get(priority)
        if known is not None and known[0] is spec and known[1] == client:
            return known[2]
        limits = (spec.cover_rows, *spec.queue_limits(priority))
        buckets = (self.keys.bucket, keys.client_bucket(self.model, client))
        made = packed([GROUP, SEEN_S, BELL_TTL_MS, *limits, *buckets])
        self._constants[priority] = spec, client, made
        return made

    def cancel(
        self, priority: int, entry_id: bytes, rows: int, size_bytes: int, key: str = ""
    ) -> int:
        """1: removed before anyone claimed it. 0: its worker is told. -1: already answered.

        -2: it goes on, since other submits of its idempotency key wait for it. `rows`,
        `size_bytes` and `key` of the task, as they were added.
        """
        k = self.keys
        script_keys = [k.streams[priority], k.cancelled, k.load, k.events]
        if key:
            script_keys.append(keys.record(self.model, key))
        removed: int = self._script(
            "cancel",
            script_keys,
            [GROUP, entry_id, CANCEL_MARK_MS, priority, rows, size_bytes],
        )
        return removed

    # The worker's side.

    def enter(self, consumer: str, count: int = 0, first: int = 0) -> Claim:
        """Starts a turn: takes a bell, covers the model, and claims as `claim` does."""
        return self._claim(consumer, count, first, enter=True)

    def claim(self, consumer: str, count: int, first: int = 0) -> Claim:
        """Claims entries of about `count` rows without waiting, the most urgent stream first.

        `first` moves one stream to the front, so that none starves.
        """
        return self._claim(consumer, count, first, enter=False)

    def _claim(self, consumer: str, count: int, first: int, *, enter: bool) -> Claim:
        k = self.keys
        order = [first, *(i for i in range(len(PRIORITIES)) if i != first)]
        answer = self._script(
            "claim",
            (k.bells, k.turns, k.cancelled, k.load, *(k.streams[i] for i in order)),
            [GROUP, consumer, TURN_LEASE_MS, count, int(enter), SCRIPT_BYTES],
        )
        now_ms, marks, *groups = answer
        cancelled = frozenset(found for mark in marks if (found := known_mark(mark)))
        entries: list[Entry] = []
        for place, found in groups:
            if isinstance(found, int):
                entries += self._read(consumer, order[place], found)
            else:
                entries += [entry_of(order[place], raw) for raw in found]
        return Claim(now_ms, cancelled, entries)

    def _read(self, consumer: str, stream: int, count: int) -> list[Entry]:
        command = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count)
        try:
            answer = self._link.call(*command, "STREAMS", self.keys.streams[stream], ">")
        except LINK_ERRORS as failure:
            # What came before is claimed already and must be run.
            log.warning("large tasks of model %r were not read: %s", self.model, failure)
            return []
        return [entry_of(stream, raw) for _, raws in answer or () for raw in raws]

    def wait(self, consumer: str, count: int, block_ms: int) -> list[Entry]:
        """Claims up to `count` entries of each stream, waiting up to `block_ms` for the first."""
        k = self.keys
        command = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "BLOCK", block_ms)
        try:
            answer = self._link.call(*command, "STREAMS", *k.streams, ">", ">", ">")
        except redis.exceptions.ResponseError as failure:
            if not str(failure).startswith("NOGROUP"):
                raise
            self.ensure_groups()
            return []
        index = {name.encode(): place for place, name in enumerate(k.streams)}
        return [entry_of(index[stream], raw) for stream, raws in answer or () for raw in raws]

    def ensure_groups(self) -> None:
        """Creates the streams and their consumer group where they are missing."""
        self._link.script("groups", (self.keys.turns, *self.keys.streams), [GROUP])

    def reclaim(
        self, consumer: str, lease_ms: int, count: int, suspect_deliveries: int, suspects: bool
    ) -> Reclaim:
        """Takes over entries whose lease ran out or that were handed back.

        With `suspects`, at most one entry that was delivered `suspect_deliveries` times or more;
        without, only entries delivered less often.
        """
        waiting, found, gone = self._script(
            "reclaim",
            (self.keys.holders, self.keys.events, *self.keys.streams),
            [GROUP, consumer, lease_ms, count, suspect_deliveries, int(suspects)],
        )
        for mark in gone:
            log.warning(
                "entry %s of model %r was deleted while a worker held it: nobody is answered",
                *(mark.decode(), self.model),
            )
        return Reclaim([reclaimed_entry(*one) for one in found], bool(waiting))

    def renew(self, consumer: str, entries: Sequence[Entry]) -> frozenset[tuple[int, bytes]]:
        """Renews the leases; returns (stream, id) of entries that are no longer ours."""
        args: list[Any] = [GROUP, consumer, TURN_LEASE_MS]
        for entry in entries:
            args += (entry.stream, entry.entry_id)
        lost = self._script("renew", (self.keys.turns, *self.keys.streams), args)
        return frozenset(mark_of(mark) for mark in lost)

    def release(self, consumer: str, entries: Sequence[Entry], lease_ms: int) -> int:
        """Hands unstarted entries back; returns how many were still ours. Rings if any."""
        args: list[Any] = [GROUP, consumer, lease_ms * 2, BELL_TTL_MS, self._bell("handed back")]
        for entry in entries:
            args += (entry.stream, entry.entry_id, entry.deliveries)
        script_keys = (self.keys.bells, self._queue, *self.keys.streams)
        released: int = self._script("release", script_keys, args)
        return released

    def disown(self, consumer: str, known: Sequence[Entry], lease_ms: int) -> list[bytes]:
        """Hands back what Redis delivered to us in answers that were lost: all but `known`.

        Returns their entry ids; rings if any. Their delivery does not count.
        """
        args: list[Any] = [GROUP, consumer, lease_ms * 2, BELL_TTL_MS, self._bell("answer lost")]
        args += [b"%d:%s" % (entry.stream, entry.entry_id) for entry in known]
        script_keys = (self.keys.bells, self._queue, *self.keys.streams)
        disowned: list[bytes] = self._link.script("disown", script_keys, args)
        return disowned

    def settle(self, settlements: Sequence[Settlement]) -> Settled:
        """Answers, acknowledges and deletes, keeps dead letters, ends idempotency keys."""
        k = self.keys
        replies: dict[str, int] = {}
        facts: list[Any] = []
        kept: list[tuple[int, Settlement]] = []
        for number, s in enumerate(settlements):
            place = -1 if s.client is None else replies.setdefault(s.client, len(replies))
            entry = s.entry
            size = len(entry.frame) if entry.frame else 0
            facts += (entry.stream, entry.entry_id, place, s.rows, size)
            if s.result_key or s.letter or entry.key:
                kept.append((number, s))
        # One argument for all small facts: each argument costs both sides about a microsecond.
        script_keys = [k.load, k.cancelled, k.dead_letters, k.dead_bytes, k.holders, *k.streams]
        script_keys += [keys.reply(client) for client in replies]
        rest: list[Any] = []
        for number, s in kept:
            if s.result_key:
                script_keys.append(s.result_key)
            place = len(script_keys) if s.result_key else 0
            if s.entry.key:
                script_keys.append(keys.record(self.model, s.entry.key))
            key = (len(script_keys), int(not s.frees_key)) if s.entry.key else (0, 0)
            rest.append((number, place, s.store_s, s.letter or "", *key, keys.reply("")))
        args = [GROUP, REPLY_TTL_S, self._letters, packed(facts), packed(rest)]
        args += [s.reply for s in settlements]
        answered, dropped, old = self._link.script("settle", script_keys, args)
        return Settled(answered, tuple(dropped), old_letters(old))

    def leave(self, consumer: str) -> bool:
        """Ends the turn; True if it rang for work that is left."""
        k = self.keys
        script_keys = (k.bells, k.turns, self._queue, *k.streams)
        args = [GROUP, consumer, BELL_TTL_MS, self._bell("work left")]
        return bool(self._link.script("leave", script_keys, args))

    def attend(self, consumer: str, ttl_ms: int, rate_limit: RateLimit | None = None) -> None:
        """Marks a live worker of this model, and publishes the limits that it was given."""
        args: list[Any] = [consumer, ttl_ms]
        for name, value in (rate_limit.published() if rate_limit else {}).items():
            args += (name, value)
        self._link.script("attend", (self.keys.workers, self.keys.limits), args)

    def absent(self, consumer: str) -> None:
        """Takes a worker that stops off the list, and its consumers where they hold nothing."""
        self._link.client.zrem(self.keys.workers, consumer)
        self.sweep()

    def sweep(self, lease_ms: int = 0) -> int:
        """Removes consumers of dead workers that hold nothing; returns how many.

        With `lease_ms` it also hands back what others of them hold, where by Redis' clock no
        time has passed since: that clock was set back.
        """
        script_keys = (self.keys.workers, *self.keys.streams)
        removed: int = self._link.script("sweep", script_keys, [GROUP, lease_ms * 2])
        return removed

    # The operator's side.

    def look(self) -> QueueState:
        """The queue's state now."""
        _, now_ms, bells, turns, workers, rows, size, dead, *streams = self._look(0, heal=False)
        high, normal, low = streams[0::3]
        ages_ms = tuple(
            max(0, now_ms - milliseconds(entry_id)) if entry_id else 0 for entry_id in streams[2::3]
        )
        claimed = sum(streams[1::3])
        return QueueState(
            high,
            normal,
            low,
            claimed,
            rows,
            size,
            max(ages_ms),
            turns,
            bells,
            workers,
            dead,
            ages_ms,
        )

    def heal(self, lease_ms: int) -> bool:
        """True if it rang: there was work that no bell and no turn covered."""
        return bool(self._look(lease_ms, heal=True)[0])

    def _look(self, lease_ms: int, *, heal: bool) -> list[Any]:
        k = self.keys
        answer: list[Any] = self._script(
            "look",
            (k.bells, k.turns, k.workers, k.load, k.dead_letters, self._queue, *k.streams),
            [GROUP, BELL_TTL_MS, lease_ms, int(heal), self._bell("uncovered work")],
        )
        return answer

    def purge(self, count: int = 1000) -> tuple[list[bytes], list[tuple[str, str]]]:
        """Takes up to `count` unclaimed entries out of each stream.

        Returns their frames, and (idempotency key, `<stream index>:<id>`) of those that have one.
        """
        frames: list[bytes] = []
        keyed: list[tuple[str, str]] = []
        k = self.keys
        for index, stream in enumerate(k.streams):
            script_keys = (stream, k.load, k.events)
            found, pairs = self._link.script("purge", script_keys, [GROUP, count])
            frames += found
            for key, entry_id in zip(pairs[::2], pairs[1::2], strict=True):
                keyed.append((known_key(key), f"{index}:{entry_id.decode()}"))
        return frames, keyed
