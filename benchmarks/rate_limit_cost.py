"""What rate limits cost where tasks are added: one Redis, with and without, rounds taken in turn.

`python -m benchmarks.rate_limit_cost --json FILE`: "limited" has both limits, set so high that they
refuse nothing. Each round adds the same flushes and empties the queue outside of the measured time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.report import Spread, machine, warn_if_busy, write_json
from producer.connection import connect
from producer.embedded import EmbeddedRedis
from producer.limits import RateLimit
from producer.link import Link
from producer.spec import ModelSpec, TensorSpec
from workers.inbox import WorkerInbox

_FRAME = b"x" * 150
_LIMIT = RateLimit(rows_per_s=1e9, per_client_rows_per_s=1e9)
_TENSOR = TensorSpec(name="x", dtype="uint8", shape=(100,))


class Model:
    """One model's queue and a client that fills it."""

    def __init__(self, link: Link, name: str, limit: RateLimit | None) -> None:
        self._link = link
        self._inbox = WorkerInbox(link, name)
        self._spec = ModelSpec(
            name=name, inputs=(_TENSOR,), outputs=(_TENSOR,), max_batch=64, max_rows_per_task=64
        )
        self._inbox.attend("worker", 3_600_000, limit and limit.with_bursts(64))
        self._flush = 0

    def add_per_s(self, tasks: int, flushes: int) -> float:
        """Tasks a second, added `tasks` at once."""
        pairs = [(1, _FRAME)] * tasks
        # A turn covers the work, as with a busy worker: no bell is needed.
        self._inbox.enter("worker")
        started_s = time.perf_counter()
        for _ in range(flushes):
            self._flush += 1
            _, ids = self._inbox.add(self._spec, 1, "bench.1", self._flush, pairs)
            assert isinstance(ids[-1], bytes)
        seconds = time.perf_counter() - started_s
        self._link.call("DEL", self._inbox.keys.normal, self._inbox.keys.load)
        return tasks * flushes / seconds


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 60,
    flushes: Annotated[int, typer.Option(min=1, help="Flushes of a round.")] = 300,
) -> None:
    """Measure what rate limits cost in throughput of the script that adds tasks."""
    console, where = Console(width=110), machine()
    warn_if_busy(console)
    ratios: dict[int, list[float]] = defaultdict(list)
    with EmbeddedRedis() as server, connect(server.url) as connection:
        link = Link(connection)
        plain, limited = Model(link, "plain", None), Model(link, "limited", _LIMIT)
        for number in range(rounds + 1):
            for tasks in (1, 64):
                models = [plain, limited] if number % 2 else [limited, plain]
                per_s = {model: model.add_per_s(tasks, flushes) for model in models}
                if number:  # the first round warms up
                    ratios[tasks].append(per_s[limited] / per_s[plain])
    for tasks, values in ratios.items():
        spread = Spread.of(values)
        console.print(
            f"{tasks} at once: limited / plain {spread.median:.3f} "
            f"({spread.least:.3f}-{spread.most:.3f})"
        )
    if json_path is not None:
        medians = {f"limited_over_plain_{n}": Spread.of(v).median for n, v in ratios.items()}
        write_json(json_path, {**medians, "ratios": dict(ratios), "machine": where})


if __name__ == "__main__":
    typer.run(main)
