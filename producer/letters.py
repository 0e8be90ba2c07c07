"""A dead letter: what is kept of a task that ended without being run, for operators to look at.

Its stream entry holds the fields of `encode_letter` and, as `d`, the task's whole frame, which the
settling script copies from the queue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

_MOST_MESSAGE = 2000
_MOST_NAME = 200


class LetterLimits(NamedTuple):
    """How much is kept for each model; the oldest letters go first."""

    tasks: int = 1000
    #: Bytes of all letters; a larger frame is not kept, only what is known of it.
    bytes: int = 64 << 20
    #: The letters expire this long after the last one came, in seconds.
    ttl_s: int = 7 * 86400


class DeadLetter(NamedTuple):
    """One dead task. `letter_id` is its place, by Redis' time in ms, in the stream of letters."""

    letter_id: str
    #: "" if nobody can tell whose task it was.
    task_id: str
    code: str
    message: str
    #: Index in PRIORITIES.
    priority: int
    rows: int
    #: To how many workers it was given, and those of them whose lease ran out with it.
    deliveries: int
    workers: tuple[str, ...]
    #: Redis' times in ms: when it was submitted, when it was given up.
    queued_ms: int
    died_ms: int
    #: Bytes of the frame.
    frame_bytes: int
    #: False if the frame was larger than all letters together may be, or there was none.
    kept: bool


class OldLetter(NamedTuple):
    """A letter that went for a newer one: because of the `count` of letters or of their `bytes`."""

    #: Of its task, or `letter:<its own id>` where that is unknown.
    name: str
    code: str
    reason: str


def old_letters(raw: Sequence[Sequence[bytes]]) -> tuple[OldLetter, ...]:
    """From the `settle` script's answer."""
    return tuple(OldLetter(*(part.decode(errors="replace") for part in one)) for one in raw)


def encode_letter(
    task_id: str,
    code: str,
    message: str,
    priority: int,
    rows: int,
    deliveries: int,
    workers: Sequence[str],
    entry_id: bytes,
    frame_bytes: int,
) -> list[str | bytes]:
    """Names and values of the fields, without the frame."""
    return [
        *("task", task_id),
        *("code", code),
        *("message", message[:_MOST_MESSAGE]),
        *("priority", str(priority)),
        *("rows", str(rows)),
        *("deliveries", str(deliveries)),
        *("workers", json.dumps([name[:_MOST_NAME] for name in workers])),
        *("entry", entry_id),
        *("bytes", str(frame_bytes)),
    ]


def decode_letter(letter_id: bytes, fields: Sequence[bytes], *, kept: bool) -> DeadLetter:
    """The letter in a stream entry. What is missing or is none becomes "" or 0."""
    found = dict(zip(fields[0::2], fields[1::2], strict=False))

    def text(name: bytes) -> str:
        return found.get(name, b"").decode(errors="replace")

    return DeadLetter(
        letter_id.decode(),
        text(b"task"),
        text(b"code"),
        text(b"message"),
        min(2, _count(text(b"priority"))),
        _count(text(b"rows")),
        _count(text(b"deliveries")),
        _names(text(b"workers")),
        _count(text(b"entry").partition("-")[0]),
        _count(letter_id.partition(b"-")[0].decode()),
        _count(text(b"bytes")),
        kept,
    )


def _count(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _names(text: str) -> tuple[str, ...]:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else ()
