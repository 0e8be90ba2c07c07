"""A model's dead letters for operators: list, look, put back into the queue, drop."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import redis

from producer import keys
from producer.bell import bell_message
from producer.catalog import Catalog
from producer.config import ProducerSettings
from producer.errors import (
    CorruptMessage,
    InvalidInput,
    MessageTooLarge,
    QueueFull,
    UnknownDeadLetter,
    UnknownModel,
)
from producer.inbox import BELL_TTL_MS
from producer.inputs import check_tensors
from producer.letters import DeadLetter, decode_letter
from producer.link import Link
from producer.quote import shown_name
from producer.spec import ModelSpec
from producer.task import InferenceTask
from producer.wire import decode_task, encode_task

log = logging.getLogger("trtq.dead")

_PAGE = 200


class Requeued(NamedTuple):
    """A dead letter that is a task again. Its outcome is kept under the new id."""

    letter_id: str
    task_id: str
    entry_id: str


class DeadLetters:
    """The dead letters of `model`. Methods raise redis-py's errors.

    A letter is named by its own id or by its task's id. The first of several letters of one task
    is the newest. `close` gives the connections that were taken from `connection` back to it.
    """

    def __init__(
        self,
        connection: redis.Redis,
        model: str,
        settings: ProducerSettings | None = None,
    ) -> None:
        self.model = keys.check_name(model)
        self._settings = settings or ProducerSettings()
        self._redis = connection
        self._link = Link(connection)
        self._keys = keys.model_keys(model)

    def close(self) -> None:
        """Gives the connections back."""
        self._link.close()

    def __len__(self) -> int:
        return int(self._redis.xlen(self._keys.dead_letters))

    def check(self) -> None:
        """Raises UnknownModel if workers published no such model and it has no letters."""
        names = _published(self._redis)
        if self.model not in names and not len(self):
            listed = ", ".join(names) if names else "none"
            raise UnknownModel(f"no model {self.model!r}; published models: {listed}")

    def letters(self, limit: int | None = None, *, newest: bool = True) -> Iterator[DeadLetter]:
        """Up to `limit` letters without their frames; the newest first, or the oldest."""
        at = "+" if newest else "-"
        left = limit if limit is not None else len(self)
        while left > 0:
            count = min(left, _PAGE)
            found = self._link.script(
                "letters", (self._keys.dead_letters,), [at, count, int(newest)]
            )
            for letter_id, kept, fields in found:
                yield decode_letter(letter_id, fields, kept=bool(kept))
            if len(found) < count:
                return
            at = f"({found[-1][0].decode()}"
            left -= count

    def letter(self, name: str) -> DeadLetter:
        """One letter by its id or its task's; raises UnknownDeadLetter."""
        if _is_letter_id(name):
            found = self._link.script("letters", (self._keys.dead_letters,), [name, 1, 0])
            if found and found[0][0].decode() == name:
                letter_id, kept, fields = found[0]
                return decode_letter(letter_id, fields, kept=bool(kept))
        for letter in self.letters():
            if letter.task_id == name:
                return letter
        raise UnknownDeadLetter(
            f"model {self.model!r} has no dead letter {shown_name(name)}; "
            f"`trtq dead list {self.model}` shows what there is"
        )

    def frame(self, letter: DeadLetter) -> bytes:
        """The task's whole message. Raises MessageTooLarge if it was not kept, UnknownDeadLetter
        if the letter has gone meanwhile, CorruptMessage if the entry held no message."""
        entries: Any = self._redis.xrange(
            self._keys.dead_letters, letter.letter_id, letter.letter_id
        )
        if not entries:
            raise UnknownDeadLetter(f"dead letter {letter.letter_id} of {self.model!r} has gone")
        frame = entries[0][1].get(b"d")
        if frame is None and letter.frame_bytes:
            raise MessageTooLarge(
                f"dead letter {letter.letter_id} has no message: its {letter.frame_bytes} bytes "
                "were more than TRTQ_DEAD_MAX_BYTES"
            )
        if frame is None:
            raise CorruptMessage(f"dead letter {letter.letter_id}: the entry held no message")
        return bytes(frame)

    def task(self, letter: DeadLetter) -> InferenceTask:
        """The task, its inputs checked in size. Raises as `frame` does, and WireError."""
        return decode_task(self.frame(letter))

    def requeue(self, letter: DeadLetter, *, deadline_s: float | None = None) -> Requeued:
        """Puts the task back as a new one, with a new id, no deliveries and a new deadline.

        Its first sender was told that it is dead, so the new answer is not for it: it is stored for
        `Client.result`, TRTQ_STORE_S long. `deadline_s` defaults to TRTQ_DEFAULT_DEADLINE_S.
        The letter leaves in the same step; after any error it is still there, except that after a
        lost connection it may have left.

        Raises UnknownModel if no worker has published the model, InvalidInput if the model has
        changed and takes no such task, QueueFull, and as `task` does.
        """
        settings = self._settings
        seconds = settings.default_deadline_s if deadline_s is None else deadline_s
        if not seconds > 0:
            raise InvalidInput(f"deadline {deadline_s!r}: give seconds from now, more than 0")
        spec = Catalog(self._redis, 0.0, time.monotonic).spec(self.model)
        task = self.task(letter)._replace(
            task_id=f"requeued.{secrets.token_hex(6)}-0",
            ttl_ms=max(1, min(int(seconds * 1000), 2**52)),
            store_s=settings.store_s,
        )
        frame = encode_task(task)
        _check(spec, task, frame)
        most_rows, most_bytes = spec.queue_limits(letter.priority)
        k = self._keys
        answer = self._link.script(
            "requeue",
            (
                *(k.dead_letters, k.dead_bytes, k.streams[letter.priority], k.bells, k.turns),
                *(k.load, keys.bell_queue(self.model), k.events),
            ),
            [
                *(keys.GROUP, letter.letter_id, task.rows),
                *(most_rows, most_bytes, BELL_TTL_MS),
                *(bell_message(self.model, "requeued"), frame),
            ],
        ).decode()
        if answer == "gone":
            raise UnknownDeadLetter(f"dead letter {letter.letter_id} of {self.model!r} has gone")
        if answer == "full":
            raise QueueFull(
                f"the queue of model {self.model!r} is full ({most_rows} rows or "
                f"{most_bytes} bytes): dead letter {letter.letter_id} stays; try later"
            )
        name = shown_name(letter.task_id or letter.letter_id)
        log.info("dead task %s of model %r is requeued as %s", name, self.model, task.task_id)
        return Requeued(letter.letter_id, task.task_id, answer)

    def drop(self, letters: Sequence[DeadLetter]) -> int:
        """Removes letters for good; returns how many were still there."""
        dropped = 0
        k = self._keys
        for first in range(0, len(letters), _PAGE):
            page = letters[first : first + _PAGE]
            dropped += self._link.script(
                "drop",
                (k.dead_letters, k.dead_bytes, k.events),
                [letter.letter_id for letter in page],
            )
            for letter in page:
                name = shown_name(letter.task_id or letter.letter_id)
                log.info("dead task %s of model %r is dropped [operator]", name, self.model)
        return dropped


def models_with_letters(connection: redis.Redis) -> list[str]:
    """Published models that have dead letters, by name. Raises redis-py's errors."""
    return [name for name in _published(connection) if len(DeadLetters(connection, name))]


def _published(connection: redis.Redis) -> list[str]:
    names: Any = connection.hkeys(keys.MODELS)
    return sorted(name.decode() for name in names)


def _is_letter_id(name: str) -> bool:
    return re.fullmatch(r"[0-9]{1,19}-[0-9]{1,19}", name) is not None


def _check(spec: ModelSpec, task: InferenceTask, frame: bytes) -> None:
    """The letter stays where it is if the worker would refuse its task at once."""
    if task.reference is None:
        check_tensors(spec, task.inputs, task.rows)
    elif not 1 <= task.rows == task.reference.stop - task.reference.start <= spec.max_rows_per_task:
        raise InvalidInput(f"model {spec.name!r} takes no task of {task.rows} referenced rows")
    if len(frame) > spec.max_task_bytes:
        raise MessageTooLarge(
            f"model {spec.name!r} takes tasks of at most {spec.max_task_bytes} bytes, this one "
            f"has {len(frame)}"
        )
