"""The client's reply stream and the one thread that reads it.

A stream and not a list: reading does not remove, so a reply that was on its way when the
connection broke is read again. Tickets ignore what they had before.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from producer import keys
from producer.connection import LINK_ERRORS, PASSING_ERRORS
from producer.errors import ClientClosed, DeadlineExceeded, TrtqError, WireError
from producer.events import count_event
from producer.inbox import REPLY_TTL_S
from producer.link import Link
from producer.ticket import Ticket
from producer.wire import decode_replies

log = logging.getLogger("trtq.mailbox")

_BLOCK_MS = 500
_SWEEP_S = 0.5
_READ_COUNT = 64
_TRIM_BYTES = 4 << 20
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class Mailbox:
    """Open tickets by task id; a reader thread answers them and fails those past their deadline."""

    def __init__(
        self, link: Link, client: str, clock: Callable[[], float], grace_s: float = 2.0
    ) -> None:
        self._link = link
        self._key = keys.reply(client)
        self._clock = clock
        self._grace_s = grace_s
        self._open: dict[str, Ticket] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: TrtqError | None = None

    def start(self) -> None:
        """Starts the reader."""
        self._thread = threading.Thread(target=self._guarded, name="trtq-mailbox", daemon=True)
        self._thread.start()

    def expect(self, ticket: Ticket) -> None:
        """From now on a reply to the ticket's task ends it."""
        self._open[ticket.task_id] = ticket
        if self._failure is not None:
            self._fail_all(self._failure)

    def forget(self, ticket: Ticket) -> None:
        """The ticket ended by itself."""
        self._open.pop(ticket.task_id, None)

    @property
    def open_tickets(self) -> int:
        """How many tickets wait for a reply."""
        return len(self._open)

    def close(self) -> None:
        """Stops the reader, fails what is open, deletes the stream."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        self._failure = ClientClosed("the client was closed before the task was answered")
        self._fail_all(self._failure)
        try:
            self._link.call("DEL", self._key)
        except LINK_ERRORS as failure:
            log.debug("the reply stream will expire by itself: %s", failure)

    def _guarded(self) -> None:
        try:
            self._read()
        except Exception as failure:
            log.exception("the reply reader died")
            self._failure = TrtqError(f"the client's reply reader died: {failure!r}")
            self._fail_all(self._failure)

    def _read(self) -> None:
        last = b"0"
        trimmed = last
        read_bytes = 0
        failures = 0
        now_s = self._clock()
        next_sweep_s, renewed_s = now_s + _SWEEP_S, now_s
        while not self._stop.is_set():
            try:
                for entry_id, (_, blob, *_) in self._next(last):
                    self._deliver(blob)
                    last = entry_id
                    read_bytes += len(blob)
                now_s = self._clock()
                due = now_s >= next_sweep_s
                if last != trimmed and (due or read_bytes >= _TRIM_BYTES):
                    self._trim(last)
                    trimmed, read_bytes, renewed_s = last, 0, now_s
                elif now_s - renewed_s > REPLY_TTL_S / 10:
                    self._link.call("EXPIRE", self._key, REPLY_TTL_S)
                    renewed_s = now_s
                failures = 0
            except PASSING_ERRORS as failure:
                # A restarted Redis may number from an earlier time: read from the start again.
                last = trimmed = b"0"
                if failures == 0:
                    log.warning("lost Redis while waiting for replies: %s", failure)
                self._stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
                now_s = self._clock()
                due = now_s >= next_sweep_s
            if due:
                self._sweep(now_s, reachable=failures == 0)
                next_sweep_s = now_s + _SWEEP_S

    def _next(self, last: bytes) -> Any:
        command = ("XREAD", "COUNT", _READ_COUNT, "BLOCK", _BLOCK_MS, "STREAMS", self._key, last)
        answer = self._link.call(*command)
        return answer[0][1] if answer else ()

    def _trim(self, last: bytes) -> None:
        """Removes what was read, now and then: for each read it would cost as much as reading."""
        self._link.call("XTRIM", self._key, "MINID", _after(last))
        self._link.call("EXPIRE", self._key, REPLY_TTL_S)

    def _deliver(self, blob: bytes) -> None:
        try:
            for reply in decode_replies(blob):
                ticket = self._open.pop(reply.task_id, None)
                if ticket is not None:
                    ticket.answer(reply)
        except WireError as failure:
            log.error("an unreadable reply was skipped: %s", failure)

    def _sweep(self, now_s: float, *, reachable: bool) -> None:
        late = [t for t in list(self._open.values()) if now_s > t.deadline_s + self._grace_s]
        unanswered: Counter[str] = Counter()
        for ticket in late:
            self._open.pop(ticket.task_id, None)
            ticket.fail(
                DeadlineExceeded(
                    f"task {ticket.task_id} of model {ticket.model!r} has no answer at its "
                    "deadline: no worker ran it in time, or Redis lost it"
                )
            )
            log.warning(
                "task %s of model %r has no answer [deadline]", ticket.task_id, ticket.model
            )
            unanswered[ticket.model] += 1
        for model, times in unanswered.items() if reachable else ():
            count_event(self._link, model, "unanswered", "deadline", times)

    def _fail_all(self, error: TrtqError) -> None:
        while self._open:
            _, ticket = self._open.popitem()
            if ticket.fail(error):
                task_id, model = ticket.task_id, ticket.model
                log.info("task %s of model %r is given up [%s]", task_id, model, error.code)


def _after(entry_id: bytes) -> bytes:
    milliseconds, _, number = entry_id.partition(b"-")
    return b"%s-%d" % (milliseconds, int(number) + 1)
