"""What happens to tasks besides being answered with a result: counted by reason, and logged.

One call does both, so that no count is without its log line. The table below is also that of
docs/failures.md; a test holds them together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from producer.entries import Entry
from producer.quote import one_line, shown_name
from producer.wire import sender_of
from workers.metrics import Counters

log = logging.getLogger("trtq.incidents")

#: A line of the log names at most this many tasks; more make more lines.
IDS_PER_LINE = 32


class Kind(NamedTuple):
    """An event's level in the log, and its reasons; none where the reason is an error's code."""

    level: int
    reasons: tuple[str, ...] = ()


CANCELLED = "cancelled"
EXPIRED = "expired"
REFUSED = "refused"
CORRUPT = "corrupt"
POISONED = "poisoned"
RETRIED = "retried"
FAILED = "failed"
RECLAIMED = "reclaimed"
RELEASED = "released"
LOST = "lost"
RETURNED = "returned"
REPLY_RETRIED = "reply_retried"
ABANDONED = "abandoned"
ROWS_FAILED = "rows_failed"
DROPPED = "dropped"
DEAD_DROPPED = "dead_dropped"

KINDS: dict[str, Kind] = {
    CANCELLED: Kind(logging.INFO, ("claimed", "held")),
    EXPIRED: Kind(logging.WARNING, ("queued", "held")),
    REFUSED: Kind(logging.WARNING),
    CORRUPT: Kind(logging.ERROR),
    POISONED: Kind(logging.ERROR, ("deliveries",)),
    RETRIED: Kind(logging.WARNING),
    FAILED: Kind(logging.WARNING),
    ROWS_FAILED: Kind(logging.WARNING),
    RECLAIMED: Kind(logging.WARNING, ("lease_expired", "handed_back", "suspect")),
    RELEASED: Kind(logging.INFO, ("stopping", "answer_lost")),
    RETURNED: Kind(logging.WARNING, ("device_lost", "batch_timeout")),
    ABANDONED: Kind(logging.ERROR, ("redis_unavailable", "drain_grace")),
    LOST: Kind(logging.WARNING, ("lease_expired",)),
    REPLY_RETRIED: Kind(logging.WARNING, ("redis_unavailable",)),
    DROPPED: Kind(logging.WARNING, ("answered_before", "redis_refused", "redis_unavailable")),
    DEAD_DROPPED: Kind(logging.WARNING, ("count", "bytes")),
}

#: Events that the heartbeat publishes too.
_TOTALS = frozenset((CANCELLED, EXPIRED, CORRUPT, POISONED, RECLAIMED, RELEASED, DROPPED))


class Incidents:
    """Events of one model in one process. Thread-safe."""

    def __init__(self, model: str, counters: Counters) -> None:
        self._model = model
        self._counters = counters
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {
            (event, reason): 0 for event, kind in KINDS.items() for reason in kind.reasons
        }

    def record(
        self,
        event: str,
        reason: str,
        task_ids: Sequence[str],
        detail: str = "",
        cause: BaseException | None = None,
    ) -> None:
        """Counts `event` once a task and logs it with their ids; does nothing for no tasks.

        `reason` is a constant or an error's code. Ids and `detail` may come from the wire: they
        are escaped and bounded here. The traceback of `cause` follows. Raises KeyError for an
        event that is none.
        """
        if not task_ids:
            return
        level = KINDS[event].level
        count = len(task_ids)
        with self._lock:
            self._counts[event, reason] = self._counts.get((event, reason), 0) + count
            if event in _TOTALS:
                setattr(self._counters, event, getattr(self._counters, event) + count)
        if not log.isEnabledFor(level):
            return
        for first in range(0, count, IDS_PER_LINE):
            names = [shown_name(task_id) for task_id in task_ids[first : first + IDS_PER_LINE]]
            log.log(
                level,
                "%s [%s] of model %r: %s%s",
                event,
                reason,
                self._model,
                ", ".join(names),
                f": {one_line(detail)}" if detail else "",
                exc_info=cause,
                extra={
                    "event": event,
                    "reason": reason,
                    "model": self._model,
                    "task_ids": names,
                },
            )

    def counts(self) -> dict[tuple[str, str], int]:
        """Tasks by (event, reason); every constant reason is there from the start."""
        with self._lock:
            return dict(self._counts)


def task_name(entry: Entry) -> str:
    """The id of an entry's task; where it cannot be read, its place in the stream."""
    return sender_of(entry.frame or b"") or f"entry:{entry.stream}:{entry.entry_id.decode()}"
