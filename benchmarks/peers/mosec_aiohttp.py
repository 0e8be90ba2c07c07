"""An ordinary Python client of the mosec server: aiohttp, as many coroutines as are in flight."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import aiohttp  # type: ignore[import-not-found]
import uvloop  # type: ignore[import-not-found]

from benchmarks.peers.loops import PAYLOADS, WrongAnswer, obey


async def _saturate(seconds: float, warm_s: float, in_flight: int) -> dict[str, Any]:
    url = f"http://127.0.0.1:{os.environ['BENCH_MOSEC_PORT']}/inference"
    sent = answered = 0
    stopping = False

    async def ask_on(session: aiohttp.ClientSession) -> None:
        nonlocal sent, answered
        while not stopping:
            payload = PAYLOADS[sent % len(PAYLOADS)]
            sent += 1
            async with session.post(url, data=payload) as response:
                if response.status != 200 or await response.read() != payload:
                    raise WrongAnswer(f"mosec answered {response.status} or another result")
            answered += 1

    connector = aiohttp.TCPConnector(limit=in_flight)
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        tasks = [asyncio.create_task(ask_on(session)) for _ in range(in_flight)]
        await asyncio.sleep(warm_s)
        start, before, cpu_s = time.perf_counter(), answered, time.process_time()
        await asyncio.sleep(seconds)
        took_s, done = time.perf_counter() - start, answered - before
        cpu_s = time.process_time() - cpu_s
        stopping = True
        await asyncio.gather(*tasks)
    return {"per_s": done / took_s, "tasks": sent, "client_cpu_us": 1e6 * cpu_s / max(1, done)}


def main() -> None:
    uvloop.install()
    obey({"saturate": lambda **options: asyncio.run(_saturate(**options))})


if __name__ == "__main__":
    main()
