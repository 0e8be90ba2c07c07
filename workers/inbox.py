"""One model's queue as a worker uses it: claims in turns, leases, answers.

Every change is one script, so nothing is half done when a connection breaks, and every method
may be called again after an error without answering anything twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import redis

from producer import keys
from producer.connection import LINK_ERRORS
from producer.entries import (
    Claim,
    Entry,
    Reclaim,
    Settled,
    Settlement,
    entry_of,
    known_mark,
    mark_of,
    reclaimed_entry,
)
from producer.inbox import BELL_TTL_MS, REPLY_TTL_S, Inbox
from producer.keys import GROUP, PRIORITIES
from producer.letters import LetterLimits, old_letters
from producer.limits import RateLimit
from producer.link import Link
from producer.scripts import packed

log = logging.getLogger("trtq.inbox")

#: A turn that did not renew itself for this long counts as dead.
TURN_LEASE_MS = 3000
#: Claims of more bytes are read by a command of their own: the script would copy each three times.
SCRIPT_BYTES = 64 << 10


class WorkerInbox(Inbox):
    """The queue of one model, for its workers. Methods raise redis-py's own errors.

    `letters` limits the dead letters that are kept.
    """

    def __init__(self, link: Link, model: str, letters: LetterLimits | None = None) -> None:
        super().__init__(link, model)
        self._letters = packed(list(letters or LetterLimits()))

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
