"""Counts in Redis of what happens to tasks where no worker sees it, read by `trtq exporter`."""

from __future__ import annotations

import logging
import re
from typing import Any

from producer import keys
from producer.connection import PASSING_ERRORS
from producer.link import Link

log = logging.getLogger("trtq.events")

_FIELD = re.compile(rb"([a-z_]{1,40}):([a-z_]{1,40})")
_MOST_FIELDS = 100


def count_event(link: Link, model: str, event: str, reason: str, times: int = 1) -> None:
    """Adds to a count. A Redis that refuses or is away costs the count, nothing else."""
    try:
        link.call("HINCRBY", keys.model_keys(model).events, f"{event}:{reason}", times)
    except PASSING_ERRORS as failure:
        log.debug("%d tasks %s [%s] were not counted: %s", times, event, reason, failure)


def read_events(link: Link, model: str) -> dict[tuple[str, str], int]:
    """Counts by (event, reason). Raises redis-py's errors."""
    found: list[Any] = link.call("HGETALL", keys.model_keys(model).events)
    counts: dict[tuple[str, str], int] = {}
    for name, value in zip(found[0::2], found[1::2], strict=True):
        field = _FIELD.fullmatch(name)
        # Anyone who may submit may write here: what is no count of ours becomes no label.
        if field and value.isdigit() and len(counts) < _MOST_FIELDS:
            counts[field[1].decode(), field[2].decode()] = int(value)
    return counts
