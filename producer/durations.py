"""Seconds as callers give them, checked before anything is computed with them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from producer.errors import InvalidInput
from producer.quote import quoted

#: Longer than anybody waits; such a number of milliseconds is still exact everywhere.
_MOST_S = 2**52 / 1000


def positive_seconds(name: str, value: Any) -> float:
    """A finite number of seconds, more than 0; raises InvalidInput that calls it `name`."""
    seconds = _seconds(value)
    if seconds is None or seconds <= 0:
        raise InvalidInput(f"{name} {quoted(value)}: give a finite number of seconds, more than 0")
    return seconds


def waiting_seconds(name: str, value: Any) -> float:
    """A finite number of seconds, 0 or more; raises InvalidInput that calls it `name`."""
    seconds = _seconds(value)
    if seconds is None or seconds < 0:
        raise InvalidInput(f"{name} {quoted(value)}: give a finite number of seconds, 0 or more")
    return seconds


def _seconds(value: Any) -> float | None:
    if type(value) is bool or not isinstance(value, Real):
        return None
    try:
        seconds = float(value)
    except OverflowError:  # a whole number of more than 300 digits
        return None
    return min(seconds, _MOST_S) if math.isfinite(seconds) else None
