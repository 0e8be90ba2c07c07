"""The client: submit tasks, get results."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from producer import keys
from producer.catalog import Catalog
from producer.config import ProducerSettings
from producer.connection import connect, named_errors
from producer.durations import positive_seconds, waiting_seconds
from producer.errors import (
    ClientClosed,
    ConfigError,
    CorruptMessage,
    InvalidInput,
    MessageTooLarge,
    ResultMissing,
    from_code,
)
from producer.inbox import Inbox
from producer.inputs import prepare, to_arrays
from producer.keys import PRIORITIES
from producer.link import Link
from producer.mailbox import Mailbox
from producer.outbox import Letter, Outbox
from producer.quote import quoted
from producer.spec import ModelSpec
from producer.task import InferenceTask, RowReference
from producer.ticket import Ticket, cancelled
from producer.wire import decode_replies, encode_task

log = logging.getLogger("trtq.client")


class Client:
    """A connection to trtq. Thread-safe; one is enough for a process.

    `redis_url` goes before `settings.redis_url` (which reads TRTQ_REDIS_URL). The client's id is
    `<name>.<hex>`; access rules and logs know it by `name`, which comes from here, from
    `settings.client_name` (TRTQ_CLIENT_NAME), from the user of the Redis URL, or is "client".
    Use it as a context manager, or call `start` and `close`. After a fork, make a new client in
    the child.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        name: str | None = None,
        settings: ProducerSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ProducerSettings()
        self.redis_url = self.settings.url_for(redis_url)
        self._name = name or self.settings.name_at(self.redis_url, "client")
        keys.check_client_name(self._name)
        self._clock = clock
        self._ticket_lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._open = False
        self._forked = False

    def start(self) -> Client:
        """Connects.

        Raises RedisUnavailable if Redis does not answer, ConfigError for a bad URL, AccessDenied
        and TlsFailed (both ConfigError).
        """
        with self._start_lock:
            if self._open:
                return self
            self._redis = connect(self.redis_url, timeout_s=self.settings.connect_timeout_s)
            with named_errors(self.redis_url):
                self._redis.ping()
            # Anew at each start: what Redis remembers of an earlier one, or of a process that was
            # forked from this one, is not ours.
            self.client_id = f"{self._name}.{secrets.token_hex(6)}"
            self._numbers = itertools.count()
            self._forked = False
            self._catalog = Catalog(self._redis, self.settings.spec_ttl_s, self._clock)
            self._link = Link(self._redis)
            self._mailbox = Mailbox(self._link, self.client_id, self._clock)
            self._outbox = Outbox(
                self._link,
                self.client_id,
                self._clock,
                self.settings.client_max_unsent,
                self._mailbox.forget,
                lambda: self._mailbox.open_tickets,
            )
            with named_errors(self.redis_url):
                self._mailbox.start()
            self._outbox.start()
            _STARTED.add(self)
            self._open = True
        return self

    def close(self, timeout: float = 5.0) -> None:
        """Sends what was submitted (at most `timeout` seconds), fails open tickets, disconnects.

        A task that was sent is still run; only its answer has no reader any more.
        """
        with self._start_lock:
            if not self._open:
                return
            self._open = False
            _STARTED.discard(self)
            if self._forked:
                # Its threads and connections are the parent's, which goes on using them.
                return
            self._outbox.close(timeout)
            self._mailbox.close()
            self._redis.close()

    def __enter__(self) -> Client:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def submit(
        self,
        model: str,
        inputs: Any,
        *,
        priority: str = "normal",
        timeout: float | None = None,
        deadline: float | None = None,
        store: bool = False,
    ) -> Ticket:
        """Submits one task and returns at once.

        `inputs`: an array (models with one input) or a dict of arrays by input name. An array
        with the rank of one row of the model is one row; with one axis more in front, a batch of
        rows, and so are the results. An ndarray keeps its values: its dtype must convert safely
        to the model's; lists and numbers take the model's dtype.

        `priority`: "high", "normal" or "low". `timeout`: seconds that the task may wait for room
        in a full queue (0: none; the ticket then fails with QueueFull at the first refusal).
        `deadline`: seconds from now after which the answer is useless; a task that is late is
        not run and fails with DeadlineExceeded. Both default to the settings. `store`: keep the
        result for `Client.result(task_id)` too.

        Raises UnknownModel, WrongInputName, WrongDtype, WrongShape, NoRows, TooManyRows,
        ForbiddenNaN, MessageTooLarge (all InvalidInput) before anything is sent; QueueFull if the
        client itself holds too many unsent tasks; RedisUnavailable; ClientClosed.
        """
        spec = self.spec(model)
        tensors, rows, single = prepare(spec, inputs)
        task = self._task(rows, deadline, store=store, inputs=tensors)
        return self._send(spec, task, single, priority, timeout, deadline)

    def submit_reference(
        self,
        model: str,
        reference: RowReference,
        *,
        priority: str = "low",
        timeout: float | None = None,
        deadline: float | None = None,
    ) -> Ticket:
        """Submits rows of files that the workers read and write themselves.

        The ticket's result is the tuple of RowErrors of rows that failed alone. Errors as for
        `submit`; a worker's refusal of the files ends the ticket with a BulkError.
        """
        spec = self.spec(model)
        rows = reference.stop - reference.start
        if not 1 <= rows <= spec.max_rows_per_task:
            raise InvalidInput(
                f"model {model!r}: a reference to {rows} rows; it may hold 1 to "
                f"{spec.max_rows_per_task}"
            )
        task = self._task(rows, deadline, store=False, reference=reference)
        return self._send(spec, task, False, priority, timeout, deadline)

    def map(
        self, model: str, iterable: Iterable[Any], *, window: int = 256, **options: Any
    ) -> Iterator[Any]:
        """Results of one task per item, in input order, at most `window` tasks under way.

        `options` as for `submit`. The first error ends the iteration and cancels what is open.
        """
        tickets: deque[Ticket] = deque()
        items = iter(iterable)
        try:
            for item in itertools.islice(items, _window(window)):
                tickets.append(self.submit(model, item, **options))
            while tickets:
                result = tickets.popleft().result()
                for item in itertools.islice(items, 1):
                    tickets.append(self.submit(model, item, **options))
                yield result
        finally:
            for ticket in tickets:
                ticket.cancel()

    def as_completed(
        self, model: str, iterable: Iterable[Any], *, window: int = 256, **options: Any
    ) -> Iterator[tuple[int, Any]]:
        """(index, result) of one task per item as they come, at most `window` under way.

        `options` as for `submit`. The first error ends the iteration and cancels what is open.
        """
        ended: deque[Ticket] = deque()
        wake = threading.Semaphore(0)
        indices: dict[str, int] = {}
        tickets: dict[str, Ticket] = {}

        def on_done(ticket: Ticket) -> None:
            ended.append(ticket)
            wake.release()

        items = enumerate(iterable)
        try:
            left = _window(window)
            while True:
                for index, item in itertools.islice(items, left):
                    ticket = self.submit(model, item, **options)
                    indices[ticket.task_id] = index
                    tickets[ticket.task_id] = ticket
                    ticket.add_done_callback(on_done)
                if not tickets:
                    return
                wake.acquire()
                ticket = ended.popleft()
                left = 1
                del tickets[ticket.task_id]
                yield indices.pop(ticket.task_id), ticket.result()
        finally:
            for ticket in tickets.values():
                ticket.cancel()

    def result(self, task_id: str, *, by_name: bool = False) -> Any:
        """The stored result of a task submitted with `store=True`, always with its batch axis.

        `by_name` gives a dict by output name also for a model with one output. Raises the task's
        own error, ResultMissing if there is none (yet, or any more), CorruptMessage.
        """
        self._check_open()
        with named_errors(self.redis_url):
            blob = self._redis.get(keys.result(task_id))
        if blob is None:
            raise ResultMissing(
                f"no stored result of task {task_id!r}: not submitted with store=True, not ready, "
                "or expired"
            )
        assert isinstance(blob, bytes)
        try:
            (reply,) = decode_replies(blob)
        except ValueError:
            raise CorruptMessage(f"what is stored of task {task_id!r} is not one reply") from None
        if reply.error_code:
            raise from_code(reply.error_code, reply.error_message)
        if not reply.outputs:
            return reply.row_errors
        return to_arrays(reply.outputs, single=False, by_name=by_name)

    def spec(self, model: str) -> ModelSpec:
        """What `model` takes and gives; raises UnknownModel, RedisUnavailable, ClientClosed."""
        self._check_open()
        if self._catalog.is_fresh(model):
            return self._catalog.spec(model)
        with named_errors(self.redis_url):
            return self._catalog.spec(model)

    def may_wait(self, model: str) -> bool:
        """True if a submit to `model` might wait now: for its spec, or for room in the client."""
        return not (self._open and self._catalog.is_fresh(model) and self._outbox.has_room())

    def models(self) -> list[ModelSpec]:
        """All published models, by name."""
        self._check_open()
        with named_errors(self.redis_url):
            return self._catalog.all()

    def cancel(self, ticket: Ticket) -> bool:
        """`Ticket.cancel`'s work."""
        self._check_open()
        if ticket.entry_id is None:
            # Not sent yet, or being sent: then whoever sees it last takes it back.
            self._mailbox.forget(ticket)
            if not ticket.fail(cancelled(ticket)):
                return False
            if ticket.entry_id is not None:
                self._remove(ticket, ticket.entry_id)
            return True
        if not self._remove(ticket, ticket.entry_id):
            return False
        self._mailbox.forget(ticket)
        return ticket.fail(cancelled(ticket))

    def _remove(self, ticket: Ticket, entry_id: bytes) -> bool:
        with named_errors(self.redis_url):
            inbox = Inbox(self._link, ticket.model)
            rows, size_bytes = ticket.rows, ticket.size_bytes
            removed = inbox.cancel(ticket.priority, entry_id, rows, size_bytes) == 1
        if removed:
            log.info("task %s of model %r is cancelled [unclaimed]", ticket.task_id, ticket.model)
        return removed

    def _task(
        self, rows: int, deadline: float | None, *, store: bool, **body: Any
    ) -> InferenceTask:
        seconds = positive_seconds(
            "deadline", self.settings.default_deadline_s if deadline is None else deadline
        )
        return InferenceTask(
            f"{self.client_id}-{next(self._numbers):x}",
            rows,
            ttl_ms=max(1, int(seconds * 1000)),
            store_s=self.settings.store_s if store else 0,
            **body,
        )

    def _send(
        self,
        spec: ModelSpec,
        task: InferenceTask,
        single: bool,
        priority: str,
        timeout: float | None,
        deadline: float | None,
    ) -> Ticket:
        try:
            place = PRIORITIES.index(priority)
        except ValueError:
            raise InvalidInput(f"priority {quoted(priority)}: use one of {PRIORITIES}") from None
        seconds = waiting_seconds(
            "timeout", self.settings.default_timeout_s if timeout is None else timeout
        )
        frame = encode_task(task)
        if len(frame) > spec.max_task_bytes:
            raise MessageTooLarge(
                f"model {spec.name!r} takes tasks of at most {spec.max_task_bytes} bytes, this one "
                f"has {len(frame)}; send fewer rows a task or raise max_task_bytes"
            )
        now = self._clock()
        ticket = Ticket(
            task.task_id,
            spec.name,
            place,
            single,
            now + task.ttl_ms / 1000,
            self,
            self._ticket_lock,
            task.rows,
            len(frame),
        )
        self._mailbox.expect(ticket)
        try:
            self._outbox.put(Letter(spec, ticket, task.rows, frame, now + seconds))
        except BaseException:
            self._mailbox.forget(ticket)
            raise
        return ticket

    def _check_open(self) -> None:
        if not self._open:
            raise ClientClosed("the client is not started or closed: use `with Client() as client`")
        if self._forked:
            raise ConfigError("this client was made before a fork: make a new one in the child")


# One hook a process: Python keeps every hook that was ever registered.
_STARTED: weakref.WeakSet[Client] = weakref.WeakSet()


def _tell_children() -> None:
    """After a fork the clients in the child know it: a flag costs less than os.getpid a call."""
    for client in list(_STARTED):
        client._forked = True


os.register_at_fork(after_in_child=_tell_children)


def _window(window: int) -> int:
    if window < 1:
        raise InvalidInput(f"window {window!r}: use 1 or more")
    return window
