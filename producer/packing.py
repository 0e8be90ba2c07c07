"""Small values as the queue's scripts and keys hold them."""

from __future__ import annotations

import logging
from typing import Any

import msgpack

log = logging.getLogger("trtq.packing")


def packed(values: list[Any]) -> bytes:
    """msgpack for a script: Redis' own knows no separate type for bytes."""
    data: bytes = msgpack.packb(values, use_bin_type=False)
    return data


def row_count(text: bytes) -> int:
    """A number of rows; 1 for what is none."""
    return int(text) if text.isdigit() and len(text) < 16 else 1


def key_digest(text: bytes) -> str:
    """A hex digest as text; empty for what is none."""
    return text.decode() if len(text) == 64 and text.isalnum() else ""


def read_mark(text: bytes) -> tuple[int, bytes]:
    """(stream index, entry id) of `<stream index>:<entry id>`."""
    stream, _, entry_id = text.partition(b":")
    return int(stream), entry_id


def known_mark(text: bytes) -> tuple[int, bytes] | None:
    """None for what no client of ours wrote: one bad member must not end every claim."""
    try:
        return read_mark(text)
    except ValueError:
        log.warning("a cancellation mark is not readable: %r", text[:64])
        return None


def milliseconds(entry_id: bytes) -> int:
    """When Redis took the entry, by its own clock."""
    return int(entry_id.partition(b"-")[0])
