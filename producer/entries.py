"""What the queue's scripts answer, as named tuples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from producer.letters import OldLetter

log = logging.getLogger("trtq.inbox")


class Entry(NamedTuple):
    """A claimed stream entry. `frame` is None when the entry holds none."""

    stream: int
    entry_id: bytes
    frame: bytes | None
    rows: int
    deliveries: int = 0
    #: Taken over after a worker handed it back.
    handed_back: bool = False
    #: Workers whose lease of it has run out, the last one last.
    holders: tuple[str, ...] = ()


class Claim(NamedTuple):
    """What one claim found: Redis' time, cancelled (stream, id) marks, and the entries."""

    now_ms: int
    cancelled: frozenset[tuple[int, bytes]]
    entries: list[Entry]


class Reclaim(NamedTuple):
    """What was taken over, and whether suspects wait that were not asked for."""

    entries: list[Entry]
    suspects_wait: bool


class Settled(NamedTuple):
    """What became of settlements: how many were answers, and the numbers of those that were
    dropped because their entry was answered before; and dead letters that went for newer ones."""

    answered: int
    dropped: tuple[int, ...] = ()
    old_letters: tuple[OldLetter, ...] = ()


def entry_of(stream: int, raw: Any) -> Entry:
    """From an entry of XREADGROUP's answer."""
    entry_id, fields = raw
    frame, rows = None, b"1"
    for name, value in zip(fields[0::2], fields[1::2], strict=True):
        if name == b"d":
            frame = value
        elif name == b"r":
            rows = value
    return Entry(stream, entry_id, frame, _count(rows))


def _count(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < 16 else 1


def mark_of(mark: bytes) -> tuple[int, bytes]:
    """(stream, id) of `<stream>:<id>`; raises ValueError."""
    stream, _, entry_id = mark.partition(b":")
    return int(stream), entry_id


def known_mark(mark: bytes) -> tuple[int, bytes] | None:
    """None for what no client of ours wrote: one bad member must not end every claim."""
    try:
        return mark_of(mark)
    except ValueError:
        log.warning("a cancellation mark is not readable: %r", mark[:64])
        return None


def milliseconds(entry_id: bytes) -> int:
    """Redis' time in an entry's id."""
    return int(entry_id.partition(b"-")[0])


def reclaimed_entry(
    stream: int, deliveries: int, raw: Any, handed_back: int, holders: Sequence[bytes]
) -> Entry:
    """From one element of the `reclaim` script's answer."""
    names = tuple(name.decode(errors="replace") for name in holders)
    return entry_of(stream, raw)._replace(
        deliveries=deliveries, handed_back=bool(handed_back), holders=names
    )
