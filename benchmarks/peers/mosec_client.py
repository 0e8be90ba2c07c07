"""A fast Python client of the mosec server: uvloop, one raw HTTP/1.1 protocol object a connection.

One connection carries one request at a time, kept alive; so `in_flight` connections are open.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, cast

import uvloop  # type: ignore[import-not-found]

from benchmarks.peers.loops import PAYLOADS, WrongAnswer, obey

_REQUESTS = [
    b"POST /inference HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(payload), payload)
    for payload in PAYLOADS
]
_LENGTH = b"content-length: "


class Load:
    """What all connections share: counters, and whether to go on."""

    def __init__(self) -> None:
        self.sent = 0
        self.answered = 0
        self.stopping = False
        self.open = 0
        self.failure: Exception | None = None
        self.drained = asyncio.Event()


class Connection(asyncio.Protocol):
    """Sends a request, checks the answer, sends the next."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:

        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class
        self._load.open += 1
        self._send()

    def _send(self) -> None:
        self._index = self._load.sent % len(PAYLOADS)
        self._load.sent += 1
        self._transport.write(_REQUESTS[self._index])

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = self._buffer.find(_LENGTH, 0, head) + len(_LENGTH)
        size = int(self._buffer[length : self._buffer.find(b"\r\n", length)])
        if len(self._buffer) < head + 4 + size:
            return
        status, body = self._buffer[9:12], self._buffer[head + 4 :]
        self._buffer = b""
        if status != b"200" or body != PAYLOADS[self._index]:
            self._load.failure = WrongAnswer(f"mosec answered request {self._index} {status!r}")
            self._transport.close()
            return
        self._load.answered += 1
        if self._load.stopping:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        load = self._load
        if not load.stopping and load.failure is None:
            load.failure = ConnectionError(f"mosec closed a connection: {exc}")
        load.open -= 1
        if not load.open:
            load.drained.set()


async def _saturate(seconds: float, warm_s: float, in_flight: int) -> dict[str, Any]:
    loop, load = asyncio.get_running_loop(), Load()
    for _ in range(in_flight):
        await loop.create_connection(
            lambda: Connection(load), "127.0.0.1", int(os.environ["BENCH_MOSEC_PORT"])
        )
    await asyncio.sleep(warm_s)
    start, before, cpu_s = time.perf_counter(), load.answered, time.process_time()
    await asyncio.sleep(seconds)
    took_s, tasks = time.perf_counter() - start, load.answered - before
    cpu_s = time.process_time() - cpu_s
    load.stopping = True
    await asyncio.wait_for(load.drained.wait(), 30)
    if load.failure is not None:
        raise load.failure
    return {
        "per_s": tasks / took_s,
        "tasks": load.sent,
        "client_cpu_us": 1e6 * cpu_s / max(1, tasks),
    }


def main() -> None:
    uvloop.install()
    obey({"saturate": lambda **options: asyncio.run(_saturate(**options))})


if __name__ == "__main__":
    main()
