"""Idempotency keys: a task that is submitted again under its key is not run again.

Redis holds a record for each key (see `lua/_key.lua`). The script that adds a task writes its
record in the same step, so of many processes that submit one key at once exactly one adds the
task; the others wait for its outcome, or get it if it is stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from producer import keys
from producer.bell import bell_message
from producer.durations import positive_seconds
from producer.errors import InvalidInput, KeyConflict, QueueFull, TrtqError
from producer.inbox import REPLY_TTL_S, Inbox
from producer.link import Link
from producer.quote import quoted
from producer.scripts import packed
from producer.spec import ModelSpec
from producer.task import Tensor

#: Submits that may wait for one task besides its own.
MOST_WAITERS = 1000


class TaskKey(NamedTuple):
    """An idempotency key and the digest of what was submitted under it.

    Keys belong to a client name, so that clients that may not read each other's results share no
    outcome: `name` is `<client name>:<hex digest>`.
    """

    name: str
    content: bytes
    window_ms: int
    #: How long Redis remembers it while the task has not ended.
    pending_ms: int


class KeyedTask(NamedTuple):
    """A task with a key on its way into a stream."""

    task_id: str
    rows: int
    frame: bytes
    key: TaskKey


class Repeated(NamedTuple):
    """The key's earlier task, and its outcome if it has ended."""

    task_id: str
    reply: bytes | None


#: The entry id of a task that was added; None: the queue is full; a number: the ms until a rate
#: limit has room; an error.
Answer: TypeAlias = "bytes | int | Repeated | TrtqError | None"


def task_key(
    owner: str, key: str, window_s: float, deadline_s: float, tensors: Sequence[Tensor]
) -> TaskKey:
    """The key of a task with these inputs, for clients named `owner`.

    Raises InvalidInput for a key or window that is none.
    """
    if not isinstance(key, str) or not key:
        raise InvalidInput(f"key {quoted(key)}: give a text that is not empty")
    window_s = positive_seconds("key_window_s", window_s)
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(packed([tensor.name, tensor.dtype, tensor.shape, len(tensor.data)]))
        content.update(tensor.data)
    # A repeat must find the record for as long as the task may end.
    pending_s = max(window_s, deadline_s + REPLY_TTL_S)
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return TaskKey(
        f"{owner}:{digest}",
        content.digest(),
        _milliseconds(window_s),
        _milliseconds(pending_s),
    )


def _milliseconds(seconds: float) -> int:
    return max(1, int(min(seconds * 1000, 2**52)))


class KeyedInbox:
    """The way into a model's queue for tasks with keys. Methods raise redis-py's own errors."""

    def __init__(self, inbox: Inbox, link: Link, most_waiters: int = MOST_WAITERS) -> None:
        self._inbox = inbox
        self._link = link
        self._most_waiters = most_waiters
        self._bell = bell_message(inbox.model, "work")

    def add(
        self, spec: ModelSpec, priority: int, client: str, tasks: Sequence[KeyedTask]
    ) -> list[Answer]:
        """Adds each task whose key is new. The same tasks again change nothing."""
        facts = []
        for task in tasks:
            name, content, window_ms, pending_ms = task.key
            facts.append((task.rows, task.task_id, content, window_ms, pending_ms, name))
        args: list[Any] = [
            self._inbox.add_constants(spec, client, priority),
            priority,
            self._bell,
            keys.result(""),
            self._most_waiters,
            packed(facts),
        ]
        args += [task.frame for task in tasks]
        model = self._inbox.model
        script_keys = (*self._inbox.keys.streams, *self._inbox.add_keys, self._inbox.keys.cancelled)
        records = (keys.record(model, task.key.name) for task in tasks)
        _, *answers = self._link.script("add_keyed", (*script_keys, *records), args)
        return [self._named(answer) for answer in answers]

    def _named(self, answer: Any) -> Answer:
        if not isinstance(answer, list):
            known: bytes | int | None = answer
            return known
        what, original, *reply = answer
        task_id = original.decode()
        if what == b"conflict":
            return KeyConflict(
                f"model {self._inbox.model!r}: the key stands for task {task_id}, which has other "
                "inputs; use another key for other inputs, or wait until the key's window ends"
            )
        if what == b"crowded":
            return QueueFull(
                f"{self._most_waiters} submits of one key wait for task {task_id} already; try "
                "later or allow a longer timeout"
            )
        return Repeated(task_id, reply[0] if reply else None)


def free_keys(link: Link, model: str, keyed: Sequence[tuple[str, str]]) -> None:
    """Frees keys, given as (key, `<stream index>:<id>`), whose tasks left the queue unrun."""
    known = [(key, entry) for key, entry in keyed if key]
    if known:
        records = (keys.record(model, key) for key, _ in known)
        args: list[Any] = [keys.reply(""), REPLY_TTL_S, *(entry for _, entry in known)]
        link.script("free_keys", (keys.model_keys(model).turns, *records), args)
