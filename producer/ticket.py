"""The future of one submitted task."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol

from producer.errors import (
    Cancelled,
    ResultTimeout,
    TrtqError,
    WireError,
    from_code,
)
from producer.inputs import to_arrays
from producer.task import Reply
from producer.wire import decode_replies

log = logging.getLogger("trtq.ticket")


class Canceller(Protocol):
    """Who can take a task back."""

    def cancel(self, ticket: Ticket) -> bool:
        """True if the task will not run."""


class Ticket:
    """What `submit` returns: wait with `result`, `await`, or a callback. Thread-safe.

    Exactly one of a reply and an error ends it, once; whatever comes later is ignored.
    """

    __slots__ = (
        "_callbacks",
        "_canceller",
        "_error",
        "_event",
        "_lock",
        "_reply",
        "_single",
        "deadline_s",
        "entry_id",
        "key",
        "model",
        "priority",
        "reply_id",
        "rows",
        "size_bytes",
        "task_id",
    )

    def __init__(
        self,
        task_id: str,
        model: str,
        priority: int,
        single: bool,
        deadline_s: float,
        canceller: Canceller,
        lock: threading.Lock,
        rows: int = 1,
        size_bytes: int = 0,
        key: str = "",
    ) -> None:
        self.task_id = task_id
        #: The id under which this client is answered: always the first one.
        self.reply_id = task_id
        self.model = model
        self.priority = priority
        self.deadline_s = deadline_s
        self.rows = rows
        self.size_bytes = size_bytes
        self.key = key
        self.entry_id: bytes | None = None
        self._single = single
        self._canceller = canceller
        self._lock = lock
        self._reply: Reply | None = None
        self._error: TrtqError | None = None
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Ticket], object]] | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else "answered" if self._reply else "open"
        return f"<Ticket {self.task_id} of {self.model!r}: {state}>"

    def done(self) -> bool:
        """True once a result or an error is there."""
        return self._reply is not None or self._error is not None

    def failed(self) -> bool:
        """True once it ended by an error of this side: cancelled, late, given up."""
        return self._error is not None

    def accepted(self) -> bool:
        """True once Redis holds the task (or it has ended)."""
        return self.entry_id is not None or self.repeated or self.done()

    @property
    def repeated(self) -> bool:
        """True once an idempotency key led to an earlier task, whose id is `task_id` then."""
        return self.task_id != self.reply_id

    def result(self, timeout: float | None = None) -> Any:
        """The outputs; waits up to `timeout` seconds (None: until the task's deadline).

        An ndarray for a model with one output, else a dict by name; without a batch axis if the
        input had none. The arrays are read-only views of the received bytes. For a task by
        reference, the tuple of its RowErrors.

        Raises the task's own error, or ResultTimeout if it is not answered in time.
        """
        if not self.done() and not self._wait(timeout):
            raise ResultTimeout(
                f"task {self.task_id} of model {self.model!r} has no answer after {timeout} s; "
                "it goes on (call result again, or cancel it)"
            )
        return self._outcome()

    def exception(self, timeout: float | None = None) -> TrtqError | None:
        """The task's error, or None if it succeeded; waits like `result`."""
        try:
            self.result(timeout)
        except ResultTimeout:
            if not self.done():
                raise
            return self._error
        except TrtqError as error:
            return error
        return None

    def cancel(self) -> bool:
        """Takes the task back if no worker has started it; True if it will not run.

        False: it is being run or has ended. A task that a worker holds but has not started ends
        with Cancelled when the worker sees the mark; then this returns False and `result` tells.
        False too if other submits of its idempotency key wait for it, or if this is one of them.
        """
        return not self.done() and self._canceller.cancel(self)

    def add_done_callback(self, callback: Callable[[Ticket], object]) -> None:
        """Calls `callback(ticket)` when the task ends, from the client's reader thread.

        At once, in this thread, if it has ended. What a callback raises is logged.
        """
        with self._lock:
            if not self.done():
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        self._call(callback)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def on_done(_: Ticket) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(on_done)
        yield from waiter
        return self._outcome()

    def answer(self, reply: Reply) -> bool:
        """The mailbox's call. False if the ticket had ended before."""
        return self._end(reply, None)

    def answer_stored(self, blob: bytes) -> None:
        """Ends the ticket with the stored reply in `blob`, if there is one."""
        try:
            for reply in decode_replies(blob):
                self.answer(reply)
        except WireError as failure:
            self.fail(failure)

    def fail(self, error: TrtqError) -> bool:
        """Ends the ticket with `error`. False if it had ended before."""
        return self._end(None, error)

    def _end(self, reply: Reply | None, error: TrtqError | None) -> bool:
        with self._lock:
            if self.done():
                return False
            self._reply, self._error = reply, error
            event, callbacks, self._callbacks = self._event, self._callbacks, None
        if event is not None:
            event.set()
        for callback in callbacks or ():
            self._call(callback)
        return True

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self.done():
                return True
            if self._event is None:
                self._event = threading.Event()
            event = self._event
        return event.wait(timeout)

    def _outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        reply = self._reply
        assert reply is not None
        if reply.error_code:
            error = from_code(reply.error_code, reply.error_message)
            raise error
        if reply.outputs:
            return to_arrays(reply.outputs, single=self._single)
        return reply.row_errors

    def _call(self, callback: Callable[[Ticket], object]) -> None:
        try:
            callback(self)
        except Exception:
            log.exception("a done callback of task %s raised", self.task_id)


def cancelled(ticket: Ticket) -> Cancelled:
    """The error of a task that its caller took back."""
    return Cancelled(f"task {ticket.task_id} of model {ticket.model!r} was cancelled")
