"""What goes into and comes out of the queue's scripts, as named tuples."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from producer.letters import OldLetter

log = logging.getLogger("trtq.inbox")

_KEY = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_-]{0,63}:[0-9a-f]{64}")


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
    #: Its idempotency key as `<client name>:<hex digest>`, or empty.
    key: str = ""


class Claim(NamedTuple):
    """What one claim found: Redis' time, cancelled (stream, id) marks, and the entries."""

    now_ms: int
    cancelled: frozenset[tuple[int, bytes]]
    entries: list[Entry]


class Reclaim(NamedTuple):
    """What was taken over, and whether suspects wait that were not asked for."""

    entries: list[Entry]
    suspects_wait: bool


class Settlement(NamedTuple):
    """One entry's end: who is told what, and what is kept."""

    entry: Entry
    rows: int
    client: str | None
    reply: bytes
    result_key: str = ""
    store_s: int = 0
    #: Fields of the dead letter to keep (see letters.py); its frame is added in Redis.
    letter: Sequence[str | bytes] = ()
    #: The task's id and tracing context, where its client traces it.
    trace: tuple[str, Mapping[str, str]] | None = None
    #: A task that ends without having been run frees its idempotency key.
    frees_key: bool = False


class Settled(NamedTuple):
    """What became of settlements: how many were answers, and the numbers of those that were
    dropped because their entry was answered before; and dead letters that went for newer ones."""

    answered: int
    dropped: tuple[int, ...] = ()
    old_letters: tuple[OldLetter, ...] = ()


def entry_of(stream: int, raw: Any) -> Entry:
    """From an entry of XREADGROUP's answer."""
    entry_id, fields = raw
    frame, rows, key = None, b"1", b""
    for name, value in zip(fields[0::2], fields[1::2], strict=True):
        if name == b"d":
            frame = value
        elif name == b"r":
            rows = value
        elif name == b"k":
            key = value
    return Entry(stream, entry_id, frame, _count(rows), key=known_key(key) if key else "")


def _count(text: bytes) -> int:
    return int(text) if text.isdigit() and len(text) < 16 else 1


def known_key(text: bytes) -> str:
    """Empty for what no client of ours wrote."""
    return text.decode() if _KEY.fullmatch(text) else ""


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
