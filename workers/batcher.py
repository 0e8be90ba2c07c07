"""Which tasks go together: a pure function of what is held and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from producer.entries import Entry
from producer.task import InferenceTask

#: dtype and row shape of every input: only tasks with equal keys share a batch.
ShapeKey: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"

#: A task held longer than this goes before more urgent ones, so that none starves.
AGING_MS = 1000.0


@dataclass(slots=True, eq=False)
class Held:
    """A claimed, checked task that waits for a batch. Times are the worker's clock in ms."""

    entry: Entry
    task: InferenceTask
    shape_key: ShapeKey
    arrived_ms: float
    expires_ms: float
    alone: bool = False

    @property
    def rows(self) -> int:
        """Rows of the task."""
        return self.task.rows


class Choice(NamedTuple):
    """A batch to run now (perhaps empty), or else the time at which to ask again."""

    batch: list[Held]
    wake_ms: float | None


def choose(
    held: Sequence[Held], now_ms: float, *, max_batch: int, max_delay_ms: float, idle: bool
) -> Choice:
    """The next batch of at most `max_batch` rows, all of one shape.

    The most urgent task leads (by priority, then arrival; a task older than AGING_MS leads
    whatever its priority) and others of its shape join in the same order. The batch goes at once
    if it is full or nothing else runs (`idle`): then waiting would gain nothing. Otherwise it
    waits until its first task is `max_delay_ms` old. A task marked `alone` runs with no other,
    and only when idle.
    """
    if not held:
        return Choice([], None)
    order = _in_order(held, now_ms)
    wake_ms: float | None = None
    tried: set[ShapeKey] = set()
    for leader in order:
        if leader.alone:
            if idle:
                return Choice([leader], None)
            continue
        if leader.shape_key in tried:
            continue
        tried.add(leader.shape_key)
        batch, full = _fill(leader, order, max_batch)
        ready_ms = min(h.arrived_ms for h in batch) + max_delay_ms
        if full or idle or now_ms >= ready_ms:
            return Choice(batch, None)
        wake_ms = ready_ms if wake_ms is None else min(wake_ms, ready_ms)
    return Choice([], wake_ms)


def _in_order(held: Sequence[Held], now_ms: float) -> Sequence[Held]:
    stream, arrived_ms = held[0].entry.stream, 0.0
    for one in held:
        if one.entry.stream != stream or one.arrived_ms < arrived_ms:
            return sorted(held, key=lambda h: _urgency(h, now_ms))
        arrived_ms = one.arrived_ms
    return held


def _urgency(held: Held, now_ms: float) -> tuple[int, float]:
    aged = now_ms - held.arrived_ms > AGING_MS
    return (-1 if aged else held.entry.stream, held.arrived_ms)


def _fill(leader: Held, order: Sequence[Held], max_batch: int) -> tuple[list[Held], bool]:
    batch: list[Held] = []
    rows = 0
    for candidate in order:
        if candidate.alone or candidate.shape_key != leader.shape_key:
            continue
        if rows + candidate.rows > max_batch:
            return batch, True
        batch.append(candidate)
        rows += candidate.rows
    return batch, rows >= max_batch
