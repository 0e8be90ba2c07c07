"""One input through one target, and what counts as a failure."""

from __future__ import annotations

import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from producer.errors import TrtqError

#: What Python and the libraries need for themselves: error objects, tables, rendered lines.
CONSTANT_BYTES = 4 << 20
#: Longest text of an error.
MESSAGE_CHARACTERS = 10_000
#: Longest processor time for one input; coverage and traced memory make it about tenfold.
LIMIT_S = 10.0


class Target(NamedTuple):
    """A decoder. `run` returns or raises a TrtqError; anything else is a crash.

    It may hold `factor` bytes of memory for each byte of its input, and CONSTANT_BYTES.
    `hostile` are inputs made to be expensive, which mutations would hardly find.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    hostile: Callable[[], list[bytes]]
    factor: int

    def bound_bytes(self, size_bytes: int) -> int:
        """Most memory that an input of this size may take."""
        return self.factor * size_bytes + CONSTANT_BYTES


class Outcome(NamedTuple):
    """What one input did. `crash` names the failure, "" without one. `seconds` of processor."""

    refused: bool
    crash: str
    peak_bytes: int
    seconds: float


@dataclass
class Score:
    """What all inputs of one target did."""

    inputs: int = 0
    refused: int = 0
    peak_bytes: int = 0
    #: Largest part of its bound that an input took.
    peak_of_bound: float = 0.0
    longest_ms: float = 0.0
    #: Each crash with the first input that caused it, in hex.
    crashes: dict[str, str] = field(default_factory=dict)

    def add(self, target: Target, data: bytes, outcome: Outcome) -> None:
        self.inputs += 1
        self.refused += outcome.refused
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        of_bound = outcome.peak_bytes / target.bound_bytes(len(data))
        self.peak_of_bound = max(self.peak_of_bound, round(of_bound, 3))
        self.longest_ms = max(self.longest_ms, round(outcome.seconds * 1000, 1))
        if outcome.crash:
            self.crashes.setdefault(outcome.crash, data[:4096].hex())


@contextmanager
def measured() -> Iterator[None]:
    """Memory is traced inside; `examine` needs it."""
    tracemalloc.start(1)
    try:
        yield
    finally:
        tracemalloc.stop()


def examine(target: Target, data: bytes) -> Outcome:
    """Runs `data` through the target."""
    refused, crash = False, ""
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    started_s = time.process_time()
    try:
        target.run(data)
    except TrtqError as failure:
        refused = True
        if len(failure.message) > MESSAGE_CHARACTERS:
            crash = f"a message of more than {MESSAGE_CHARACTERS} characters at {_place(failure)}"
    except Exception as failure:
        crash = f"{type(failure).__name__} at {_place(failure)}: {str(failure)[:200]}"
    seconds = time.process_time() - started_s
    peak_bytes = max(0, tracemalloc.get_traced_memory()[1] - before)
    if not crash and peak_bytes > target.bound_bytes(len(data)):
        crash = "more memory than the bound"
    if not crash and seconds > LIMIT_S:
        crash = f"more than {LIMIT_S:g} s of processor time"
    return Outcome(refused, crash, peak_bytes, seconds)


def _place(failure: BaseException) -> str:
    frames = traceback.extract_tb(failure.__traceback__)
    ours: Any = [frame for frame in frames if "/producer/" in frame.filename] + [
        frame for frame in frames if "/workers/" in frame.filename
    ]
    last = (ours or frames)[-1]
    return f"{last.filename.rpartition('/')[2]}:{last.lineno}"
