"""Sends what was submitted: one thread, one pipeline for all that came close together."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import redis

from producer.connection import LINK_ERRORS, PASSING_ERRORS, access_denied, redis_full
from producer.errors import KeyConflict, QueueFull, RedisUnavailable, TrtqError
from producer.events import count_event
from producer.inbox import Inbox
from producer.keyed import Answer, KeyedInbox, KeyedTask, Repeated, TaskKey
from producer.link import Link
from producer.refusals import Holds, refusal
from producer.spec import ModelSpec
from producer.ticket import Ticket

log = logging.getLogger("trtq.outbox")

_FLUSH_TASKS = 512
_FLUSH_BYTES = 4 << 20
_BACKOFF_S = (0.02, 0.05, 0.1, 0.2, 0.4)
_FULL_RETRY_S = 0.02
_IDLE_S = 1.0
# With many tasks under way their number counts, not the next one's latency: gather a moment.
_BUSY_TASKS = 32
_GATHER_S = 0.001

#: What letters must share to leave in one script call: model, priority, whether they have keys.
Group: TypeAlias = tuple[str, int, bool]


class Letter(NamedTuple):
    """A task on its way into a stream. `give_up_s` is the clock time until which to try."""

    spec: ModelSpec
    ticket: Ticket
    rows: int
    frame: bytes
    give_up_s: float
    key: TaskKey | None = None

    @property
    def group(self) -> Group:
        """With whom it may leave."""
        return self.spec.name, self.ticket.priority, self.key is not None


class Outbox:
    """The sender thread and what waits for it."""

    def __init__(
        self,
        link: Link,
        client: str,
        clock: Callable[[], float],
        max_unsent: int,
        forget: Callable[[Ticket], None],
        in_flight: Callable[[], int],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._link = link
        self._client = client
        self._clock = clock
        self._max_unsent = max_unsent
        self._forget = forget
        self._in_flight = in_flight
        self._sleep = sleep
        self._queue: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._inboxes: dict[str, Inbox] = {}
        self._keyed: dict[str, KeyedInbox] = {}
        self._carried: Counter[str] = Counter()
        self._retry_s: dict[Group, float] = {}
        self._holds: Holds[Group] = Holds(clock)
        self._flush = 0
        self._refused: Counter[tuple[str, str]] = Counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: TrtqError | None = None

    def start(self) -> None:
        """Starts the sender."""
        self._thread = threading.Thread(target=self._guarded, name="trtq-outbox", daemon=True)
        self._thread.start()

    def has_room(self, model: str) -> bool:
        """True if `put` of a task of `model` would not wait now.

        Tasks that a full queue refused and that are tried again count for their own model only.
        """
        return self._queue.qsize() + self._carried.get(model, 0) < self._max_unsent

    def put(self, letter: Letter) -> None:
        """Hands a task to the sender; raises QueueFull if it has no room until `give_up_s`."""
        if self._failure is not None:
            raise self._failure
        if not self.has_room(letter.spec.name):
            self._wait_for_room(letter)
        self._queue.put(letter)

    def _wait_for_room(self, letter: Letter) -> None:
        with self._room:
            while not self.has_room(letter.spec.name):
                left = letter.give_up_s - self._clock()
                if left <= 0 or self._failure is not None:
                    task_id, model = letter.ticket.task_id, letter.spec.name
                    log.info("task %s of model %r is refused [client_full]", task_id, model)
                    raise QueueFull(
                        f"{self._max_unsent} tasks of this client for model {model!r} wait to be "
                        "sent to Redis; submit less at once or allow a longer timeout"
                    )
                self._room.wait(min(left, 0.5))

    def close(self, timeout_s: float) -> None:
        """Sends what is left, for at most `timeout_s`, and stops the sender."""
        self._stop.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=timeout_s)
            self._thread = None

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as failure:
            log.exception("the sender died")
            self._failure = TrtqError(f"the client's sender died: {failure!r}")
            self._fail_rest(self._failure)

    def _fail_rest(self, error: TrtqError) -> None:
        while True:
            try:
                letter = self._queue.get_nowait()
            except queue.Empty:
                return
            if letter is not None:
                self._refuse(letter, error)

    def _run(self) -> None:
        carried: list[Letter] = []
        while not (self._stop.is_set() and self._queue.empty() and not carried):
            letters = [letter for letter in carried if not letter.ticket.done()]
            letters += self._collect(wait=not letters)
            carried = []
            groups: dict[Group, list[Letter]] = {}
            for letter in letters:
                groups.setdefault(letter.group, []).append(letter)
            for group in sorted(groups):
                carried += self._send_unless_full(group, groups[group])
            self._carried = Counter(letter.spec.name for letter in carried)
            self._count_refused()
            with self._room:
                self._room.notify_all()
            if len(carried) >= len(letters) and carried:
                self._stop.wait(_FULL_RETRY_S)

    def _send_unless_full(self, group: Group, letters: list[Letter]) -> list[Letter]:
        """Sends a group, unless its queue was full a moment ago; returns what has to wait."""
        if self._clock() < self._retry_s.get(group, 0.0) and not self._stop.is_set():
            return letters
        refused = self._send_in_parts(group, letters)
        if refused:
            self._retry_s[group] = self._clock() + _FULL_RETRY_S
        return refused

    def _collect(self, *, wait: bool) -> list[Letter]:
        letters: list[Letter] = []
        size = 0
        try:
            first = self._queue.get(timeout=_IDLE_S) if wait else self._queue.get_nowait()
            if self._in_flight() > _BUSY_TASKS:
                self._sleep(_GATHER_S)
            while True:
                if first is not None and not first.ticket.done():
                    letters.append(first)
                    size += len(first.frame)
                if len(letters) >= _FLUSH_TASKS or size >= _FLUSH_BYTES:
                    break
                first = self._queue.get_nowait()
        except queue.Empty:
            pass
        return letters

    def _send_in_parts(self, group: Group, letters: list[Letter]) -> list[Letter]:
        again: list[Letter] = []
        for first in range(0, len(letters), _FLUSH_TASKS):
            left_s = self._holds.left_s(group)
            if left_s > 0:
                # First come, first served: new letters wait behind those that were refused.
                return again + self._patient(letters[first:], math.ceil(left_s * 1000))
            part = letters[first : first + _FLUSH_TASKS]
            refused = self._send(part)
            again += refused
            if len(refused) == len(part):
                return again + letters[first + _FLUSH_TASKS :]
        return again

    def _send(self, letters: list[Letter]) -> list[Letter]:
        """Adds one group; returns those that a full queue refused and that may try again."""
        spec = letters[0].spec
        inbox = self._inboxes.get(spec.name)
        if inbox is None:
            inbox = self._inboxes[spec.name] = Inbox(self._link, spec.name)
        self._flush += 1
        failures = 0
        while True:
            try:
                answers = self._add(inbox, letters)
                break
            except redis.exceptions.OutOfMemoryError as failure:
                # A refused script has written nothing, so each task may give up for itself.
                return self._patient(letters, redis_full(failure))
            except LINK_ERRORS as failure:
                if failures == 0:
                    log.warning("lost Redis while sending: %s", failure)
                if self._expired(letters, failure):
                    return []
                self._stop.wait(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                failures += 1
            except redis.exceptions.ResponseError as failure:
                error: TrtqError = RedisUnavailable(f"Redis refused the task: {failure}")
                if isinstance(failure, redis.exceptions.NoPermissionError):
                    error = access_denied(failure)
                for letter in letters:
                    self._refuse(letter, error)
                return []
        again = []
        for letter, answer in zip(letters, answers, strict=True):
            if isinstance(answer, bytes):
                letter.ticket.entry_id = answer
                if letter.ticket.failed():
                    self._take_back(inbox, letter)
            elif isinstance(answer, Repeated):
                self._join(letter, answer)
            elif isinstance(answer, KeyConflict):
                self._refuse(letter, answer)
            else:
                if isinstance(answer, int):
                    self._holds.keep(letter.group, answer / 1000)
                again += self._patient([letter], answer)
        return again

    def _add(self, inbox: Inbox, letters: list[Letter]) -> Sequence[Answer]:
        spec, priority = letters[0].spec, letters[0].ticket.priority
        keyed = [
            KeyedTask(one.ticket.reply_id, one.rows, one.frame, one.key)
            for one in letters
            if one.key is not None
        ]
        if not keyed:
            tasks = [(letter.rows, letter.frame) for letter in letters]
            return inbox.add(spec, priority, self._client, self._flush, tasks)[1]
        keyed_inbox = self._keyed.get(spec.name)
        if keyed_inbox is None:
            keyed_inbox = self._keyed[spec.name] = KeyedInbox(inbox, self._link)
        return keyed_inbox.add(spec, priority, self._client, keyed)

    def _join(self, letter: Letter, earlier: Repeated) -> None:
        """The key was used before: the ticket stands for the earlier task."""
        letter.ticket.task_id = earlier.task_id
        if earlier.reply is not None:
            self._forget(letter.ticket)
            letter.ticket.answer_stored(earlier.reply)

    def _patient(self, letters: list[Letter], answer: Answer) -> list[Letter]:
        """Refuses those that have given up; returns those that may try again."""
        now = self._clock()
        again = []
        for letter in letters:
            if now >= letter.give_up_s or self._stop.is_set():
                self._refuse(
                    letter, refusal(answer, letter.spec, letter.rows, letter.ticket.priority)
                )
            else:
                again.append(letter)
        return again

    def _take_back(self, inbox: Inbox, letter: Letter) -> None:
        """Cancels a task whose ticket ended while it was being sent."""
        entry_id = letter.ticket.entry_id
        assert entry_id is not None
        try:
            size_bytes, key = len(letter.frame), letter.ticket.key
            inbox.cancel(letter.ticket.priority, entry_id, letter.rows, size_bytes, key)
        except PASSING_ERRORS as failure:
            log.warning("task %s was not taken back: %s", letter.ticket.task_id, failure)

    def _expired(self, letters: list[Letter], failure: BaseException) -> bool:
        """Fails the whole flush once its most patient task has given up; it is retried as one."""
        now = self._clock()
        if not self._stop.is_set() and any(
            now < letter.give_up_s and now < letter.ticket.deadline_s for letter in letters
        ):
            return False
        error = RedisUnavailable(
            f"Redis did not take the task in time ({failure}); it may or may not hold it"
        )
        for letter in letters:
            self._refuse(letter, error)
        return True

    def _refuse(self, letter: Letter, error: TrtqError) -> None:
        self._forget(letter.ticket)
        if not letter.ticket.fail(error):
            return
        model = letter.spec.name
        log.info("task %s of model %r is refused [%s]", letter.ticket.task_id, model, error.code)
        if not isinstance(error, RedisUnavailable):
            self._refused[model, error.code] += 1

    def _count_refused(self) -> None:
        refused, self._refused = self._refused, Counter()
        for (model, code), times in refused.items():
            count_event(self._link, model, "refused", code, times)
