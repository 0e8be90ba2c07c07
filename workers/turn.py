"""A turn: claim, answer what cannot run, feed the slots, renew, go on until the stream is empty."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from producer.connection import LINK_ERRORS
from producer.entries import Claim, Entry, Settlement
from producer.errors import RedisUnavailable
from producer.quote import shown_name
from workers.batcher import Held
from workers.claims import ClaimOrder
from workers.feed import Feed
from workers.inbox import WorkerInbox
from workers.incidents import ABANDONED, LOST, RECLAIMED, RELEASED, Incidents, task_name
from workers.intake import Intake
from workers.ledger import Ledger
from workers.ranges import CLAIM, NO_RANGES, WAIT, Ranges
from workers.replies import Replier

log = logging.getLogger("trtq.turn")

_SLICE_MS = 100
_QUANTUM_MS = 100.0
#: A turn that has caught up leaves to another model after this: no more than 50 turns a second.
_LEAST_TURN_MS = 20.0
_RECLAIM_MS = 1000.0
_FIRST_RECLAIM_MS = 5.0
_LINK_PATIENCE_MS = 5000.0


class TurnLimits(NamedTuple):
    """Times in ms and rows that bound a turn."""

    #: Rows that may wait for a slot, and rows that may be unanswered in all.
    held_rows: int
    unanswered_rows: int
    lease_ms: int
    linger_ms: float
    #: How long one wait for new entries may take: nothing else is seen meanwhile.
    wait_ms: float
    budget_ms: float
    max_deliveries: int
    #: How long a turn's end waits for what runs: of a worker that stops, and of one that goes on.
    drain_ms: float
    finish_ms: float


class Turn:
    """One turn of one worker on one model. `clock` gives ms and never goes back.

    `stopping()` is true when the worker shuts down; `others_wait()` when another model's bell
    waits for this worker.
    """

    def __init__(
        self,
        inbox: WorkerInbox,
        consumer: str,
        intake: Intake,
        feed: Feed,
        replier: Replier,
        ledger: Ledger,
        order: ClaimOrder,
        incidents: Incidents,
        limits: TurnLimits,
        clock: Callable[[], float],
        stopping: Callable[[], bool],
        others_wait: Callable[[], bool],
        ranges: Ranges = NO_RANGES,
    ) -> None:
        self._inbox = inbox
        self._consumer = consumer
        self._intake = intake
        self._feed = feed
        self._replier = replier
        self._ledger = ledger
        self._order = order
        self._incidents = incidents
        self._limits = limits
        self._clock = clock
        self._stopping = stopping
        self._others_wait = others_wait
        self._ranges = ranges
        self._offset_ms = 0.0
        self._entry_rows = 1.0
        self._more_suspects = False

    def run(self) -> None:
        """Runs the turn; rings at its end if work is left that nobody covers."""
        started_ms = self._clock()
        try:
            self._disown()
            # The first claim comes with the first call: from idle, each round trip is latency.
            room = self._limits.held_rows
            with self._ranges.open(CLAIM):
                claim = self._inbox.enter(self._consumer, room, self._order.next())
            claimed = self._accept(claim)
            self._work(started_ms, backlog=claimed >= room)
        except LINK_ERRORS as failure:
            log.warning("the turn on %r ends, Redis is away: %s", self._inbox.model, failure)
            self._ledger.unsure = True
        self._finish()
        try:
            self._disown()
            if self._inbox.leave(self._consumer):
                log.debug("the turn on %r left work to another", self._inbox.model)
        except LINK_ERRORS as failure:
            log.warning("the turn on %r could not sign off: %s", self._inbox.model, failure)

    def _work(self, started_ms: float, *, backlog: bool) -> None:
        limits = self._limits
        quiet_since_ms = started_ms
        renew_every_ms = min(limits.lease_ms / 3, 1000.0)
        renew_ms = started_ms + renew_every_ms
        # New work first, and the slots their first moment alone.
        reclaim_ms = started_ms + _FIRST_RECLAIM_MS
        while True:
            now_ms = self._clock()
            if self._stopping() or now_ms - started_ms > limits.budget_ms:
                return
            least_ms = _QUANTUM_MS if backlog else _LEAST_TURN_MS
            if now_ms - started_ms > least_ms and self._others_wait():
                return
            if now_ms >= renew_ms:
                self._renew()
                renew_ms = now_ms + renew_every_ms
            if now_ms >= reclaim_ms:
                if self._reclaim():
                    quiet_since_ms = now_ms
                reclaim_ms = now_ms + _RECLAIM_MS
            self._expire()
            room = self._room()
            if room <= 0:
                few = self._feed.wait_at_most(limits.held_rows // 2, _SLICE_MS)
                if few and self._ledger.rows >= limits.unanswered_rows:
                    # Few are held, so what fills the ledger are answers on their way to Redis.
                    self._replier.wait_sent(_SLICE_MS)
                quiet_since_ms = self._clock()
                backlog = True
                continue
            if backlog:
                claimed = self._claim(room)
                backlog = claimed >= room
            else:
                left_ms = limits.linger_ms - (now_ms - quiet_since_ms)
                if self._more_suspects:
                    left_ms = 0.0
                claimed = self._wait(room, min(limits.wait_ms, max(1.0, left_ms)))
                backlog = claimed >= room
            if claimed or len(self._ledger):
                quiet_since_ms = self._clock()
            elif self._more_suspects:
                self._reclaim()
                quiet_since_ms = self._clock()
            elif self._clock() - quiet_since_ms >= limits.linger_ms:
                if not self._reclaim():
                    return
                quiet_since_ms = self._clock()

    def _room(self) -> int:
        limits = self._limits
        if self._ledger.rows >= limits.unanswered_rows:
            return 0
        held = self._feed.held_rows
        # Claiming a few at a time costs more than it brings while the slots have enough.
        return limits.held_rows - held if held <= limits.held_rows // 2 else 0

    def _claim(self, count: int) -> int:
        with self._ranges.open(CLAIM):
            claim = self._inbox.claim(self._consumer, count, self._order.next())
        return self._accept(claim)

    def _accept(self, claim: Claim) -> int:
        self._set_clock(claim.now_ms)
        if claim.cancelled:
            self._withdraw(
                lambda held: (held.entry.stream, held.entry.entry_id) in claim.cancelled,
                self._intake.cancelled,
            )
        self._take_in(claim.entries, claim.cancelled)
        return self._measure(claim.entries)

    def _wait(self, room: int, block_ms: float) -> int:
        count = max(1, int(room / self._entry_rows))
        with self._ranges.open(WAIT):
            entries = self._inbox.wait(self._consumer, count, int(block_ms))
        self._take_in(entries)
        return self._measure(entries)

    def _measure(self, entries: list[Entry]) -> int:
        """Rows of what was claimed; the mean of it bounds the next blocking claim."""
        rows = sum(entry.rows for entry in entries)
        if entries:
            self._entry_rows = max(1.0, rows / len(entries))
        return rows

    def _reclaim(self) -> int:
        limits = self._limits
        entries, suspects_wait = self._inbox.reclaim(
            self._consumer, limits.lease_ms, limits.held_rows, limits.max_deliveries, False
        )
        expired = [entry for entry in entries if not entry.handed_back]
        workers = ", ".join(dict.fromkeys(shown_name(e.holders[-1]) for e in expired if e.holders))
        self._incidents.record(RECLAIMED, "lease_expired", _names(expired), f"from {workers}")
        handed_back = [entry for entry in entries if entry.handed_back]
        self._incidents.record(RECLAIMED, "handed_back", _names(handed_back))
        self._take_in(entries)
        self._more_suspects = suspects_wait
        return len(entries) + (self._run_suspects() if suspects_wait else 0)

    def _run_suspects(self) -> int:
        """Runs tasks that were with too many workers one by one, with nothing else in work.

        New work waits for that, at most until the slots have run dry and for a moment after.
        """
        if not self._run_dry():
            return 0
        limits = self._limits
        until_ms = self._clock() + _QUANTUM_MS
        count = 0
        while not self._stopping():
            suspects, _ = self._inbox.reclaim(
                self._consumer, limits.lease_ms, 1, limits.max_deliveries, True
            )
            for suspect in suspects:
                workers = ", ".join(map(shown_name, suspect.holders)) or "unknown workers"
                detail = f"after {suspect.deliveries} deliveries, runs alone; held by {workers}"
                self._incidents.record(RECLAIMED, "suspect", _names([suspect]), detail)
            if not suspects:
                self._more_suspects = False
                break
            count += 1
            self._take_in(suspects)
            if not self._run_dry() or self._clock() >= until_ms:
                break
        return count

    def _run_dry(self) -> bool:
        """Waits until all that was claimed is answered; False if the worker stops or time is up."""
        give_up_ms = self._clock() + self._limits.finish_ms
        while len(self._ledger):
            if self._stopping() or self._clock() >= give_up_ms:
                return False
            self._feed.wait_idle(_SLICE_MS)
            if self._feed.idle:
                self._replier.wait_sent(_SLICE_MS)
            self._expire()
            self._renew()
        return True

    def _take_in(
        self, entries: list[Entry], cancelled: frozenset[tuple[int, bytes]] = frozenset()
    ) -> None:
        if not entries:
            return
        new = self._ledger.open(entries)
        redis_now_ms = int(self._clock() + self._offset_ms)
        admitted = self._intake.admit(new, redis_now_ms, cancelled)
        if admitted.held:
            self._feed.add(admitted.held)
        if admitted.settlements:
            self._replier.put(admitted.settlements)

    def _expire(self) -> None:
        if self._feed.held_rows:
            now_ms = self._clock()
            self._withdraw(lambda held: held.expires_ms <= now_ms, self._intake.expired)

    def _withdraw(
        self,
        unwanted: Callable[[Held], bool],
        answer: Callable[[list[Held], str], list[Settlement]],
    ) -> None:
        settlements = answer(self._feed.withdraw(unwanted), "held")
        if settlements:
            self._replier.put(settlements)

    def _renew(self) -> None:
        entries = self._ledger.entries()
        if not entries:
            return
        lost = self._inbox.renew(self._consumer, entries)
        if lost:
            # Answered meanwhile, or taken over after a long pause: nothing to run here.
            gone = self._feed.withdraw(lambda h: (h.entry.stream, h.entry.entry_id) in lost)
            self._incidents.record(LOST, "lease_expired", [held.task.task_id for held in gone])
            self._ledger.closed([held.entry for held in gone])

    def _disown(self) -> None:
        """Hands back what was claimed by calls whose answers were lost.

        Else it would wait for its lease, and count as a delivery that nobody survived.
        """
        if not self._ledger.unsure:
            return
        known, lease_ms = self._ledger.entries(), self._limits.lease_ms
        disowned = self._inbox.disown(self._consumer, known, lease_ms)
        self._ledger.unsure = False
        # Their messages never came, so the entries' ids name them.
        names = [entry_id.decode() for entry_id in disowned]
        self._incidents.record(RELEASED, "answer_lost", names)

    def _set_clock(self, redis_now_ms: int) -> None:
        self._offset_ms = redis_now_ms - self._clock()

    def _finish(self) -> None:
        """Lets the slots finish; hands back what they have not started if the worker stops."""
        limits = self._limits
        give_up_ms = self._clock() + limits.finish_ms
        failures_until_ms = self._clock() + _LINK_PATIENCE_MS
        stop_seen = False
        while len(self._ledger) and self._clock() < give_up_ms:
            if self._stopping():
                if not stop_seen:
                    stop_seen = True
                    give_up_ms = min(give_up_ms, self._clock() + limits.drain_ms)
                # Each time: a slot that lost its device gives its batch back while others run.
                self._hand_back()
            self._feed.wait_idle(_SLICE_MS)
            if self._feed.idle:
                # Only answers are under way; they leave within moments or wait for Redis.
                self._replier.wait_sent(_SLICE_MS)
                if self._clock() > failures_until_ms:
                    return
            else:
                failures_until_ms = self._clock() + _LINK_PATIENCE_MS
            try:
                self._expire()
                self._renew()
            except LINK_ERRORS as failure:
                log.debug("leases were not renewed: %s", failure)
        if len(self._ledger):
            detail = "not answered when the turn ended; they come back when their lease runs out"
            names = _names(self._ledger.entries())
            self._incidents.record(ABANDONED, "drain_grace", names, detail)

    def _hand_back(self) -> None:
        entries = [held.entry for held in self._feed.withdraw(lambda held: True)]
        hand_back(
            entries,
            self._inbox,
            self._consumer,
            self._limits.lease_ms,
            self._ledger,
            self._incidents,
        )


def hand_back(
    entries: list[Entry],
    inbox: WorkerInbox,
    consumer: str,
    lease_ms: int,
    ledger: Ledger,
    incidents: Incidents,
) -> None:
    """Gives `entries` of a worker that stops to the next one; without Redis their lease does."""
    if not entries:
        return
    try:
        released = inbox.release(consumer, entries, lease_ms)
        lost = len(entries) - released
        detail = f"{lost} of them were no longer this worker's" if lost else ""
        incidents.record(RELEASED, "stopping", _names(entries), detail)
    except LINK_ERRORS as failure:
        detail = f"come back when their lease runs out: {failure}"
        incidents.record(ABANDONED, RedisUnavailable.code, _names(entries), detail)
    ledger.closed(entries)


def _names(entries: Iterable[Entry]) -> list[str]:
    return [task_name(entry) for entry in entries]
