"""A trtq client in an open loop: tasks leave on schedule, whatever becomes of earlier ones."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.peers.loops import PAYLOADS, Loops, WrongAnswer, obey
from producer import Client
from producer.ticket import Ticket

_END_S = 60.0
_ROWS = [np.frombuffer(payload, np.uint8) for payload in PAYLOADS]


class _Outcomes:
    """What became of the tasks of one order. Filled by the client's reader and sender threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent_s: dict[str, float] = {}
        self._ended: list[tuple[Ticket, float]] = []

    def watch(self, ticket: Ticket, due_s: float) -> None:
        with self._changed:
            self._sent_s[ticket.task_id] = due_s
        ticket.add_done_callback(self._end)

    def _end(self, ticket: Ticket) -> None:
        with self._changed:
            self._ended.append((ticket, time.perf_counter()))
            self._changed.notify_all()

    def wait(self) -> None:
        """Until every task has ended; raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ended) == len(self._sent_s), _END_S):
                missing = len(self._sent_s) - len(self._ended)
                raise TimeoutError(f"{missing} tasks have no end after {_END_S} s")

    def summary(self, start_s: float) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        samples_ms: list[float] = []
        answered_s: list[float] = []
        refused_after_s: list[float] = []
        for ticket, ended_s in self._ended:
            failure = ticket.exception(0)
            counts[failure.code if failure else "ok"] += 1
            took_s = ended_s - self._sent_s[ticket.task_id]
            if failure is None:
                samples_ms.append(1000 * took_s)
                answered_s.append(ended_s - start_s)
            elif failure.code == "queue_full":
                refused_after_s.append(took_s)
        return {
            "tasks": len(self._sent_s),
            "outcomes": dict(counts),
            "samples_ms": samples_ms,
            "answered_s": answered_s,
            "refused_after_s": min(refused_after_s, default=None),
        }


def main() -> None:
    url, model = os.environ["BENCH_REDIS_URL"], os.environ["BENCH_MODEL"]
    with Client(url) as client:

        def submit(i: int) -> Ticket:
            return client.submit(model, _ROWS[i])

        def finish(i: int, ticket: Ticket) -> None:
            if ticket.result(_END_S).tobytes() != PAYLOADS[i]:
                raise WrongAnswer(f"trtq answered request {i} with another result")

        def send(tasks: int, per_s: float, priority: str, timeout_s: float) -> dict[str, Any]:
            """Latency counts from when a task was due, so that a late sender hides nothing."""
            outcomes = _Outcomes()
            start_s = time.perf_counter()
            for number in range(tasks):
                due_s = start_s + number / per_s
                wait_s = due_s - time.perf_counter()
                if wait_s > 0:
                    time.sleep(wait_s)
                row = _ROWS[number % len(_ROWS)]
                ticket = client.submit(model, row, priority=priority, timeout=timeout_s)
                outcomes.watch(ticket, due_s)
            sent_in_s = time.perf_counter() - start_s
            outcomes.wait()
            return {"sent_in_s": sent_in_s, **outcomes.summary(start_s)}

        obey({"saturate": Loops(submit, finish).saturate, "send": send})


if __name__ == "__main__":
    main()
