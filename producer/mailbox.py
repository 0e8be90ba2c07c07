"""The client's list of replies, the thread that reads it, and the one that watches deadlines.

Reading does not remove, so a reply that was on its way when the connection broke is read again;
tickets ignore what they had before. A list, because Redis' access rules give a user its commands
on all of its keys: whoever may read a stream of replies could read a model's stream of tasks too.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

import redis

from producer import keys
from producer.connection import PASSING_ERRORS, access_denied
from producer.errors import (
    ClientClosed,
    DeadlineExceeded,
    ResultMissing,
    TrtqError,
    WireError,
)
from producer.events import count_event
from producer.link import Link
from producer.task import Reply
from producer.ticket import Ticket
from producer.wire import decode_replies

log = logging.getLogger("trtq.mailbox")

_BLOCK_S = 0.5
_SWEEP_S = 0.5
#: With the sweep, a ticket ends at most two seconds after its deadline.
_GRACE_S = 2.0 - _SWEEP_S
_READ_COUNT = 64
#: The first bytes of a reply hold its task's id, so they tell it from others.
_HEAD_BYTES = 256
_FULL_RETRY_S = 0.02
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class Mailbox:
    """Open tickets by task id: one thread answers them, another fails those past their deadline.

    Two, because a read from a connection that is open and dead takes the connection's timeout.
    """

    def __init__(
        self, link: Link, client: str, clock: Callable[[], float], grace_s: float = _GRACE_S
    ) -> None:
        self._link = link
        self._key = keys.reply(client)
        self._clock = clock
        self._grace_s = grace_s
        self._open: dict[str, Ticket] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lost = False
        self._unanswered: deque[str] = deque()
        self._failure: TrtqError | None = None

    def start(self) -> None:
        """Starts the reader and the watch; raises redis-py's errors if it could not read."""
        self._next()
        for name, work in (("trtq-mailbox", self._read), ("trtq-deadlines", self._watch)):
            thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def expect(self, ticket: Ticket) -> None:
        """From now on a reply to the ticket's task ends it."""
        self._open[ticket.reply_id] = ticket
        if self._failure is not None:
            self._fail_all(self._failure)

    def forget(self, ticket: Ticket) -> None:
        """The ticket ended by itself."""
        self._open.pop(ticket.reply_id, None)

    @property
    def open_tickets(self) -> int:
        """How many tickets wait for a reply."""
        return len(self._open)

    def close(self) -> None:
        """Stops both threads, fails what is open, empties the list."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10)
        reachable = not self._lost and not any(thread.is_alive() for thread in self._threads)
        self._threads = []
        self._failure = ClientClosed("the client was closed before the task was answered")
        self._fail_all(self._failure)
        if not reachable:
            # The list expires by itself; whoever closes has waited for Redis long enough.
            return
        try:
            self._link.call("LTRIM", self._key, 1, 0)
        except PASSING_ERRORS as failure:
            log.debug("the replies will expire by themselves: %s", failure)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as failure:
            log.exception("a thread of the mailbox died")
            name = threading.current_thread().name
            self._failure = TrtqError(f"the client's thread {name!r} died: {failure!r}")
            self._fail_all(self._failure)

    def _read(self) -> None:
        head, count = b"", 0
        failures = 0
        while not self._stop.is_set():
            try:
                replies = self._next(head, count) or self._wait()
                for blob in replies:
                    self._deliver(blob)
                head, count = (replies[0][:_HEAD_BYTES], len(replies)) if replies else (b"", 0)
                self._count_unanswered()
                failures = 0
                self._lost = False
            except PASSING_ERRORS as failure:
                if isinstance(failure, redis.exceptions.NoPermissionError):
                    self._fail_all(access_denied(failure))
                self._lost = True
                if failures == 0:
                    log.warning("lost Redis while waiting for replies: %s", failure)
                self._stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1

    def _watch(self) -> None:
        while not self._stop.wait(_SWEEP_S):
            self._sweep(self._clock())

    def _next(self, head: bytes = b"", count: int = 0) -> list[bytes]:
        """Removes the `count` replies that were read, the first with `head`; what is next."""
        found: list[bytes] = self._link.script("replies", (self._key,), [head, count, _READ_COUNT])
        return found

    def _wait(self) -> list[bytes]:
        """The first reply once there is one, left where it is."""
        try:
            first = self._link.call("BLMOVE", self._key, self._key, "LEFT", "LEFT", _BLOCK_S)
        except redis.exceptions.OutOfMemoryError:
            # Redis at maxmemory refuses every command that might write more, this one too.
            self._stop.wait(_FULL_RETRY_S)
            return self._next()
        return [] if first is None else [first]

    def _deliver(self, blob: bytes) -> None:
        try:
            for reply in decode_replies(blob):
                if reply.stored_as:
                    self._fetch(reply)
                    continue
                ticket = self._open.pop(reply.task_id, None)
                if ticket is not None:
                    ticket.answer(reply)
        except WireError as failure:
            log.error("an unreadable reply was skipped: %s", failure)

    def _fetch(self, notice: Reply) -> None:
        """Answers a ticket that waited for an earlier task of its key from that task's reply."""
        ticket = self._open.get(notice.task_id)
        if ticket is None:
            return
        blob = self._link.call("GET", keys.result(notice.stored_as))
        self.forget(ticket)
        ticket.answer_stored(blob or b"")
        ticket.fail(
            ResultMissing(
                f"task {notice.stored_as}, which had the same key, ended without a stored outcome"
            )
        )

    def _sweep(self, now_s: float) -> None:
        late = [t for t in list(self._open.values()) if now_s > t.deadline_s + self._grace_s]
        for ticket in late:
            self._open.pop(ticket.reply_id, None)
            ticket.fail(
                DeadlineExceeded(
                    f"task {ticket.task_id} of model {ticket.model!r} has no answer at its "
                    "deadline: no worker ran it in time, or Redis lost it"
                )
            )
            log.warning(
                "task %s of model %r has no answer [deadline]", ticket.task_id, ticket.model
            )
            self._unanswered.append(ticket.model)

    def _count_unanswered(self) -> None:
        """In the reader's thread: on a dead connection the watch must not wait for a count."""
        if not self._unanswered:
            return
        counts = Counter(self._unanswered.popleft() for _ in range(len(self._unanswered)))
        for model, times in counts.items():
            count_event(self._link, model, "unanswered", "deadline", times)

    def _fail_all(self, error: TrtqError) -> None:
        while self._open:
            try:
                _, ticket = self._open.popitem()
            except KeyError:
                # The other thread ended the last one.
                return
            if ticket.fail(error):
                task_id, model = ticket.task_id, ticket.model
                log.info("task %s of model %r is given up [%s]", task_id, model, error.code)
