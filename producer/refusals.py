"""What a client does about tasks that Redis does not take for now."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from producer.errors import QueueFull, RateLimited, TrtqError
from producer.keyed import Answer
from producer.keys import PRIORITIES
from producer.spec import ModelSpec

_MOST_HELD_S = 1.0

Group = TypeVar("Group", bound=Hashable)


class Holds(Generic[Group]):
    """Until when rate limits keep back groups of tasks, by the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        #: Until when to hold, and from when the limit is said to have room.
        self._held: dict[Group, tuple[float, float]] = {}

    def left_s(self, group: Group) -> float:
        """Seconds until the limit has room, while the group is kept back; else 0."""
        if group not in self._held:
            return 0.0
        until_s, room_s = self._held[group]
        now_s = self._clock()
        if now_s >= until_s:
            del self._held[group]
            return 0.0
        return room_s - now_s

    def keep(self, group: Group, wait_s: float) -> None:
        """Keeps the group back; a long wait in several short ones, since limits may change."""
        now_s = self._clock()
        held = now_s + min(wait_s, _MOST_HELD_S), now_s + wait_s
        self._held[group] = min(held, self._held.get(group, held))


def refusal(answer: Answer, spec: ModelSpec, rows: int, priority: int) -> TrtqError:
    """The error of a task of `rows` rows that was refused for now with this answer."""
    if isinstance(answer, TrtqError):
        return answer
    if not isinstance(answer, int):
        most_rows, most_bytes = spec.queue_limits(priority)
        return QueueFull(
            f"the queue of model {spec.name!r} is full for tasks of priority "
            f"{PRIORITIES[priority]!r} ({most_rows} rows or {most_bytes} bytes); try later, allow "
            "a longer timeout, or add workers"
        )
    error = RateLimited(
        f"a rate limit of model {spec.name!r}, for all clients or for this client's name, "
        f"has no room for {rows} rows before {answer / 1000:.3f} s from now; submit less, "
        "try later or allow a longer timeout"
    )
    error.retry_after_s = answer / 1000
    return error
