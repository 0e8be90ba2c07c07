"""The client: submit tasks, get results."""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
from producer.keyed import TaskKey, task_key
from producer.keys import PRIORITIES
from producer.link import Link
from producer.mailbox import Mailbox
from producer.outbox import Letter, Outbox
from producer.quote import quoted
from producer.spec import ModelSpec
from producer.task import InferenceTask, RowReference
from producer.ticket import Ticket, cancelled
from producer.tracing import client_tracing
from producer.windows import as_completed, in_order
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
            self._tracing = client_tracing() if self.settings.tracing else None
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
        key: str | None = None,
        key_window_s: float | None = None,
    ) -> Ticket:
        """Submits one task and returns at once.

        `inputs`: an array (models with one input) or a dict of arrays by input name. An array
        with the rank of one row of the model is one row; with one axis more in front, a batch of
        rows, and so are the results. An ndarray keeps its values: its dtype must convert safely
        to the model's; lists and numbers take the model's dtype.

        `priority`: "high", "normal" or "low". `timeout`: seconds that the task may wait for room
        in a full queue or below a rate limit (0: none; the ticket then fails with QueueFull or
        its child RateLimited at the first refusal).
        `deadline`: seconds from now after which the answer is useless; a task that is late is
        not run and fails with DeadlineExceeded. Both default to the settings. `store`: keep the
        result for `Client.result(task_id)` too.

        `key`: an idempotency key. Whichever client of this name submits the same inputs to the
        model under the same key within `key_window_s` (default: the settings'), or while the task
        is open, gets a ticket for this task and its outcome instead of another run, and once it
        ended its `task_id`; priority and deadline stay those of the first submit. Other inputs
        under the key end the ticket with KeyConflict. A task that ended without having been run
        (cancelled, late, purged, never accepted) frees its key. A key implies `store`.

        Raises UnknownModel, WrongInputName, WrongDtype, WrongShape, NoRows, TooManyRows,
        ForbiddenNaN, MessageTooLarge (all InvalidInput) before anything is sent; QueueFull if the
        client itself holds too many unsent tasks; RedisUnavailable; ClientClosed.
        """
        spec = self.spec(model)
        tensors, rows, single = prepare(spec, inputs)
        store_s = self.settings.store_s if store else 0
        if key is None:
            if key_window_s is not None:
                raise InvalidInput(f"key_window_s {quoted(key_window_s)} without a key: give both")
            task = self._task(rows, deadline, store_s, inputs=tensors)
            return self._send(spec, task, single, priority, timeout)
        window_s = self.settings.key_window_s if key_window_s is None else key_window_s
        named = task_key(self._name, key, window_s, self._deadline_s(deadline), tensors)
        store_s = max(store_s, math.ceil(named.window_ms / 1000))
        task = self._task(rows, deadline, store_s, inputs=tensors)
        return self._send(spec, task, single, priority, timeout, named)

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
        task = self._task(rows, deadline, reference=reference)
        return self._send(spec, task, False, priority, timeout)

    def map(
        self, model: str, iterable: Iterable[Any], *, window: int = 256, **options: Any
    ) -> Iterator[Any]:
        """Results of one task per item, in input order, at most `window` tasks under way.

        `options` as for `submit`. The first error ends the iteration and cancels what is open.
        """
        return in_order(partial(self.submit, model, **options), iterable, window)

    def as_completed(
        self, model: str, iterable: Iterable[Any], *, window: int = 256, **options: Any
    ) -> Iterator[tuple[int, Any]]:
        """(index, result) of one task per item as they come, at most `window` under way.

        `options` as for `submit`. The first error ends the iteration and cancels what is open.
        """
        return as_completed(partial(self.submit, model, **options), iterable, window)

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
        return not (self._open and self._catalog.is_fresh(model) and self._outbox.has_room(model))

    def models(self) -> list[ModelSpec]:
        """All published models, by name."""
        self._check_open()
        with named_errors(self.redis_url):
            return self._catalog.all()

    def cancel(self, ticket: Ticket) -> bool:
        """`Ticket.cancel`'s work."""
        self._check_open()
        if ticket.repeated:
            return False
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
            facts = ticket.rows, ticket.size_bytes, ticket.key
            removed = inbox.cancel(ticket.priority, entry_id, *facts) == 1
        if removed:
            log.info("task %s of model %r is cancelled [unclaimed]", ticket.task_id, ticket.model)
        return removed

    def _task(
        self, rows: int, deadline: float | None, store_s: int = 0, **body: Any
    ) -> InferenceTask:
        seconds = self._deadline_s(deadline)
        return InferenceTask(
            f"{self.client_id}-{next(self._numbers):x}",
            rows,
            ttl_ms=max(1, int(seconds * 1000)),
            store_s=store_s,
            **body,
        )

    def _deadline_s(self, deadline: float | None) -> float:
        return positive_seconds(
            "deadline", self.settings.default_deadline_s if deadline is None else deadline
        )

    def _send(
        self,
        spec: ModelSpec,
        task: InferenceTask,
        single: bool,
        priority: str,
        timeout: float | None,
        key: TaskKey | None = None,
    ) -> Ticket:
        if self._tracing is None:
            return self._put(spec, task, single, priority, timeout, key)
        with self._tracing.submit(spec.name, task.task_id, task.rows) as span:
            traced = task._replace(trace=span.carrier)
            ticket = self._put(spec, traced, single, priority, timeout, key)
        ticket.add_done_callback(span.end)
        return ticket

    def _put(
        self,
        spec: ModelSpec,
        task: InferenceTask,
        single: bool,
        priority: str,
        timeout: float | None,
        key: TaskKey | None,
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
            key.name if key else "",
        )
        self._mailbox.expect(ticket)
        try:
            self._outbox.put(Letter(spec, ticket, task.rows, frame, now + seconds, key))
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
