"""A trtq client with everything at once: priorities, deadlines, cancelling, bulk jobs, restarts."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.peers.loops import PAYLOADS, WrongAnswer, obey
from benchmarks.report import percentile
from producer import Client
from producer.bulk import run_bulk
from producer.config import ProducerSettings
from producer.errors import TrtqError, WrongShape
from producer.keys import PRIORITIES
from producer.ticket import Ticket

_ROWS = [np.frombuffer(payload, np.uint8) for payload in PAYLOADS]
_END_S = 60.0
_STORE_S = 20
_CHURN_TASKS = 10
_PAUSE_S = 1.0


class Mix:
    """Tasks that are sent on schedule; their latencies are kept as one p99 for each slice."""

    def __init__(self, client: Client, models: list[str], seed: int) -> None:
        self._client, self._models = client, models
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._outcomes: Counter[str] = Counter()
        self._slices: list[float] = []
        self._urgent_ms: list[float] = []
        self._open = 0
        self._wrong = 0

    def run(self, seconds: float, per_s: float, slice_s: float) -> dict[str, Any]:
        start_s = time.perf_counter()
        slice_end_s, number = start_s + slice_s, 0
        while (due_s := start_s + number / per_s) < start_s + seconds:
            wait_s = due_s - time.perf_counter()
            if wait_s > 0:
                time.sleep(wait_s)
            if due_s >= slice_end_s:
                self._end_slice()
                slice_end_s += slice_s
            self._send(number, due_s)
            number += 1
        self._end_slice()
        give_up_s = time.monotonic() + _END_S
        while self._open:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{self._open} tasks have no end after {_END_S} s")
            time.sleep(0.05)
        if self._wrong:
            raise WrongAnswer(f"{self._wrong} tasks were answered with another result")
        return {"tasks": number, "outcomes": dict(self._outcomes), "high_p99_ms": self._slices}

    def _send(self, number: int, due_s: float) -> None:
        dice = self._random
        index = number % len(_ROWS)
        model, priority = dice.choice(self._models), dice.choice(PRIORITIES)
        kind = dice.choices(("plain", "late", "cancel", "store", "wrong"), (86, 5, 5, 3, 1))[0]
        if kind == "wrong":
            try:
                self._client.submit(model, _ROWS[index][:-1])
            except WrongShape:
                self._count("wrong_shape")
            return
        ticket = self._client.submit(
            model,
            _ROWS[index],
            priority=priority,
            deadline=0.002 if kind == "late" else 30.0,
            store=kind == "store",
        )
        with self._lock:
            self._open += 1
        urgent = priority == "high" and kind == "plain"

        def end(ended: Ticket) -> None:
            self._end(ended, index, due_s, urgent)

        ticket.add_done_callback(end)
        if kind == "cancel":
            ticket.cancel()

    def _end(self, ticket: Ticket, index: int, due_s: float, urgent: bool) -> None:
        took_ms = 1000 * (time.perf_counter() - due_s)
        failure = ticket.exception(0)
        right = failure is not None or ticket.result(0).tobytes() == PAYLOADS[index]
        with self._lock:
            self._open -= 1
            self._wrong += not right
            self._outcomes[failure.code if failure else "ok"] += 1
            if urgent and failure is None:
                self._urgent_ms.append(took_ms)

    def _end_slice(self) -> None:
        with self._lock:
            samples, self._urgent_ms = self._urgent_ms, []
        if samples:
            self._slices.append(percentile(samples, 99))

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._outcomes[outcome] += 1


def main() -> None:
    url, models = os.environ["BENCH_REDIS_URL"], os.environ["BENCH_MODELS"].split(",")
    settings = ProducerSettings(store_s=_STORE_S)

    def mix(seconds: float, per_s: float, slice_s: float, seed: int) -> dict[str, Any]:
        with Client(url, settings=settings) as client:
            return Mix(client, models, seed).run(seconds, per_s, slice_s)

    def churn(seconds: float) -> dict[str, Any]:
        """A new client for every few tasks, as short-lived programs are."""
        outcomes: Counter[str] = Counter()
        end_s, clients = time.monotonic() + seconds, 0
        while time.monotonic() < end_s:
            clients += 1
            with Client(url, settings=settings) as client:
                tickets = [client.submit(models[0], _ROWS[i]) for i in range(_CHURN_TASKS)]
                for ticket in tickets:
                    failure: TrtqError | None = ticket.exception(_END_S)
                    outcomes[failure.code if failure else "ok"] += 1
            time.sleep(_PAUSE_S / 10)
        return {"tasks": clients * _CHURN_TASKS, "clients": clients, "outcomes": dict(outcomes)}

    def bulk(seconds: float, data: str, output: str) -> dict[str, Any]:
        end_s, jobs, rows = time.monotonic() + seconds, 0, 0
        with Client(url, settings=settings) as client:
            while time.monotonic() < end_s:
                summary = run_bulk(client, models[-1], data, output, window=4, overwrite=True)
                if summary.failed:
                    raise WrongAnswer(f"{summary.failed} rows of a bulk job failed")
                jobs, rows = jobs + 1, rows + summary.rows
                time.sleep(_PAUSE_S)
        if not np.array_equal(np.load(output), np.load(data)):
            raise WrongAnswer("the last bulk job's output differs")
        return {"tasks": jobs, "rows": rows, "outcomes": {"ok": jobs}}

    obey({"mix": mix, "churn": churn, "bulk": bulk})


if __name__ == "__main__":
    main()
