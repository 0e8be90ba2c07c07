"""What every client process here does: closed loops, and orders taken as JSON lines.

Standard library only, because the peers run in a virtualenv of their own.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

Handle = TypeVar("Handle")
PAYLOAD_BYTES = 100
#: Distinct payloads, so that an answer to another request is noticed.
PAYLOADS = [bytes((i * 37 + j) % 256 for j in range(PAYLOAD_BYTES)) for i in range(251)]


class WrongAnswer(AssertionError):
    """A request was answered with something else than its own result."""


class Loops(Generic[Handle]):
    """Closed loops over one system: `submit(i)` sends request `i`, `finish` waits for its answer.

    `finish(i, handle)` raises WrongAnswer unless the answer is request `i`'s. `i` counts up
    modulo `requests`.
    """

    def __init__(
        self,
        submit: Callable[[int], Handle],
        finish: Callable[[int, Handle], None],
        requests: int = len(PAYLOADS),
    ) -> None:
        self._submit = submit
        self._finish = finish
        self._requests = requests

    def saturate(self, seconds: float, warm_s: float, in_flight: int) -> dict[str, Any]:
        """Keeps `in_flight` requests open from this thread; counts answers after `warm_s`.

        Latencies are of requests finished in the order in which they were sent.
        """
        submit, finish, requests = self._submit, self._finish, self._requests
        open_requests: deque[tuple[int, Handle, float]] = deque()
        clock, sent, answered = time.perf_counter, 0, 0
        took_s: list[float] = []
        for _ in range(in_flight):
            open_requests.append((sent % requests, submit(sent % requests), clock()))
            sent += 1
        start = clock() + warm_s
        end = start + seconds
        first_s = first = last_s = 0.0
        cpu_s = 0.0
        while True:
            index, handle, sent_s = open_requests.popleft()
            finish(index, handle)
            answered += 1
            now = clock()
            if now >= start and not first_s:
                first_s, first, cpu_s = now, answered, time.process_time()
            if first_s:
                took_s.append(now - sent_s)
            if now >= end and first_s:
                last_s, last, cpu_s = now, answered, time.process_time() - cpu_s
                break
            index = sent % requests
            sent_s = clock()
            open_requests.append((index, submit(index), sent_s))
            sent += 1
        while open_requests:
            index, handle, _ = open_requests.popleft()
            finish(index, handle)
        took_s.sort()
        tasks = last - first
        return {
            "per_s": tasks / (last_s - first_s),
            "tasks": sent,
            "client_cpu_us": 1e6 * cpu_s / max(1.0, tasks),
            "p50_ms": 1000 * took_s[len(took_s) // 2],
            "p99_ms": 1000 * took_s[len(took_s) * 99 // 100],
        }

    def serial(
        self, seconds: float, warm: int = 20, pause: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """One request after another; `pause` is called, untimed, before each."""
        samples_ms: list[float] = []
        i = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(samples_ms) < 3:
            if pause is not None:
                pause()
            start = time.perf_counter()
            self._finish(i % self._requests, self._submit(i % self._requests))
            took_ms = 1000 * (time.perf_counter() - start)
            i += 1
            if i > warm:
                samples_ms.append(took_ms)
        return {"samples_ms": samples_ms, "tasks": i}


def obey(orders: Mapping[str, Callable[..., Any]]) -> None:
    """Runs `{"order": name, ...options}` lines of standard input until it ends.

    Each is answered with a line: `{"answer": ...}` or `{"error": text}`.
    """
    print(json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        try:
            answer = {"answer": orders[options.pop("order")](**options)}
        except Exception:  # noqa: BLE001 - the other side raises it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
