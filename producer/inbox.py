"""One model's queue as clients and operators use it: three streams and the bell rule.

Every change is one script, so nothing is half done when a connection breaks, and every method
may be called again after an error without adding anything twice. `workers.inbox` claims and
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from producer import keys
from producer.bell import bell_message
from producer.entries import known_key, milliseconds
from producer.keys import GROUP, PRIORITIES
from producer.link import Link
from producer.scripts import packed
from producer.spec import ModelSpec

#: A bell older than this counts as lost. It costs that much time, never a task.
BELL_TTL_MS = 1000
#: How long a cancellation waits for the worker that holds its task.
CANCEL_MARK_MS = 600_000
#: How long a flush may be retried without being added twice.
SEEN_S = 120
#: Replies wait this long for a client that is gone or away.
REPLY_TTL_S = 600


class QueueState(NamedTuple):
    """A look at one model's queue. Depths count entries, also those that a worker holds.

    `claimed` counts the latter; what a worker handed back unstarted waits and is not among them.
    """

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

    def __init__(self, link: Link, model: str) -> None:
        self.model = model
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

    def ensure_groups(self) -> None:
        """Creates the streams and their consumer group where they are missing."""
        self._link.script("groups", (self.keys.turns, *self.keys.streams), [GROUP])

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
