"""Connections between clients, workers and Redis that break, stall, crawl or go deaf."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos.judge import check, judge
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.rig import Rig


def link_reset(folder: Path, seconds: float) -> dict[str, Any]:
    """All connections reset, again and again."""
    return _inject(folder, seconds, "link to Redis reset", 0.7, lambda proxy: proxy.reset())


def link_loses_answers(folder: Path, seconds: float) -> dict[str, Any]:
    """Requests reach Redis, their answers do not, then the connection breaks."""
    return _inject(
        folder,
        seconds,
        "answers of Redis lost, then reset",
        0.7,
        lambda proxy: proxy.lose_answers(0.2),
    )


def link_stalled(folder: Path, seconds: float) -> dict[str, Any]:
    """Nothing passes for 2 s, again and again."""
    return _inject(folder, seconds, "link to Redis stalls 2 s", 4.0, lambda proxy: proxy.stall(2.0))


def link_slow(folder: Path, seconds: float) -> dict[str, Any]:
    """Every chunk takes 30 ms more, and connections break besides."""

    def slow(proxy: Proxy) -> None:
        proxy.slow(0.03)
        proxy.reset()

    return _inject(folder, seconds, "link to Redis slow (30 ms) and reset", 5.0, slow)


def link_half_open(folder: Path, seconds: float) -> dict[str, Any]:
    """Open connections swallow what is sent, stay open and never answer; new ones work."""
    return _inject(
        folder,
        seconds,
        "link to Redis half open",
        max(8.0, seconds / 2),
        lambda proxy: proxy.half_open(),
    )


def link_partly_half_open(folder: Path, seconds: float) -> dict[str, Any]:
    """The same for a third of the connections, chosen by chance, every few seconds."""
    return _inject(
        folder,
        seconds,
        "a third of the links half open",
        max(3.0, seconds / 5),
        lambda proxy: proxy.half_open(0.33),
    )


def _inject(
    folder: Path, seconds: float, name: str, every_s: float, fault: Callable[[Proxy], None]
) -> dict[str, Any]:
    with Rig(folder, through_proxy=True) as rig:
        assert rig.proxy is not None
        rig.load(seconds)
        times = 0
        end_s = time.monotonic() + seconds
        time.sleep(min(1.0, seconds / 4))
        while time.monotonic() < end_s:
            fault(rig.proxy)
            times += 1
            time.sleep(min(every_s, max(0.0, end_s - time.monotonic())))
        rig.proxy.slow(0)
        clients = rig.loaded(seconds)
        row = judge(name, clients, seconds, times=times, **rig.counters())
        check(row, not row["poisoned"], f"{row['poisoned']} good tasks were taken for poison")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row
