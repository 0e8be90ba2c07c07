"""With which stream a claim begins: the most urgent one mostly, and each of the others its turn."""

from __future__ import annotations

_HIGH, _NORMAL, _LOW = range(3)


class ClaimOrder:
    """The order of one worker's claims on one model. It outlives turns, which may be short.

    Every 16th claim begins with low, every other 4th with normal, the rest with high. What room
    the first stream leaves goes to the others, from high to low. One thread at a time.
    """

    def __init__(self) -> None:
        self._claims = 0

    def next(self) -> int:
        """The stream (0 is high) with which the next claim begins."""
        self._claims += 1
        if self._claims % 16 == 0:
            return _LOW
        return _NORMAL if self._claims % 4 == 0 else _HIGH
