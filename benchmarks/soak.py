"""Mixed traffic for a long time: nothing grows, nothing is left, latency stays.

`python -m benchmarks.soak --seconds 600 --json FILE`: two models, three priorities, deadlines,
cancelling, stored results, short-lived clients and bulk jobs. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import redis
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import fixed_time
from benchmarks.models import write_echo
from benchmarks.peers.loops import PAYLOAD_BYTES
from benchmarks.processes import ROOT, BenchmarkError, Driver
from benchmarks.redis_keys import undocumented
from benchmarks.report import Target, machine, print_targets, warn_if_busy, write_json
from benchmarks.trtq_worker import TrtqWorker, trtq_worker
from benchmarks.watched import Growth, Watch
from producer import keys
from producer.connection import connect
from producer.embedded import EmbeddedRedis
from producer.inbox import Inbox
from producer.link import Link

_MODELS = ("echo", "steady")
_BATCH_MS = 5.0
_API_CLIENTS = 2
_SLICE_S = 10.0
_BULK_ROWS = 20_000
_SAMPLE_S = 1.0
_WARM_S = 120.0
_MINUTE_S = 60.0
_EMPTY_S = 30.0
#: What a process may gain a minute once it is warm: allocators move by less, a leak by more.
_MOST_MIB_PER_MIN = 1.0
#: The machine's other users change latency; ours would grow without an end.
_MOST_P99_RATIO = 2.0


class Soak:
    """Redis, a worker with two models, and clients."""

    def __init__(self, stack: ExitStack, folder: Path, seconds: float, per_s: float) -> None:
        self._stack, self._folder = stack, folder
        self._seconds, self._per_s = seconds, per_s
        self.outcomes: dict[str, dict[str, int]] = {}
        self.p99_ms: list[list[float]] = []

    def start(self) -> None:
        """Starts all processes."""
        server = self._stack.enter_context(EmbeddedRedis())
        url = server.url
        self.redis = self._stack.enter_context(connect(url))
        # A stack of its own: what is left is looked at when the worker has stopped.
        self._worker_stack = self._stack.enter_context(ExitStack())
        self._worker = self._start_worker(url)
        env = {"BENCH_REDIS_URL": url, "BENCH_MODELS": ",".join(_MODELS)}
        command = [sys.executable, "-m", "benchmarks.peers.trtq_mixed"]
        names = (*(f"api-{i}" for i in range(_API_CLIENTS)), "churn", "bulk")
        self._clients = {
            name: self._stack.enter_context(Driver(name, command, self._folder, env))
            for name in names
        }

    def _start_worker(self, url: str) -> TrtqWorker:
        write_echo(self._folder / "echo.onnx", PAYLOAD_BYTES)
        rows = np.random.default_rng(3).integers(0, 256, (_BULK_ROWS, PAYLOAD_BYTES), np.uint8)
        np.save(self._folder / "rows.npy", rows)
        output = {"name": "y", "dtype": "uint8", "shape": [PAYLOAD_BYTES]}
        function = f"{fixed_time.MODULE}:postprocess"
        echo, steady = ({"name": name, "path": "../echo.onnx", "threads": 1} for name in _MODELS)
        steady["postprocess"] = {"function": function, "outputs": [output]}
        env = {
            "TRTQ_HOOK_MODULES": fixed_time.MODULE,
            fixed_time.BATCH_MS: str(_BATCH_MS),
            "PYTHONPATH": str(ROOT),
        }
        return self._worker_stack.enter_context(
            trtq_worker(url, self._folder, echo, self._folder, env=env, more_models=[steady])
        )

    def run(self, console: Console) -> Watch:
        """Sends the traffic and watches; returns what was seen."""
        pids = {name: client.process.pid for name, client in self._clients.items()}
        pids["worker"] = self._worker.service.process.pid
        pids["redis"] = self.redis.info("server")["process_id"]
        watch = Watch(pids, self.redis)
        for name, client in self._clients.items():
            self._order(name, client)
        said_s = 0.0
        while watch.age_s < self._seconds:
            watch.sample()
            self._worker.service.check()
            if watch.age_s >= said_s + _MINUTE_S:
                said_s += _MINUTE_S
                console.print(f"{said_s:.0f} of {self._seconds:.0f} s")
            time.sleep(_SAMPLE_S)
        for name, client in self._clients.items():
            answer = client.answer(90)
            self.outcomes[name] = answer["outcomes"]
            if "high_p99_ms" in answer:
                self.p99_ms.append(answer["high_p99_ms"])
        return watch

    def _order(self, name: str, client: Driver) -> None:
        seconds = self._seconds
        if name == "churn":
            client.order("churn", seconds=seconds)
        elif name == "bulk":
            data, output = self._folder / "rows.npy", self._folder / "output.npy"
            client.order("bulk", seconds=seconds, data=str(data), output=str(output))
        else:
            seed = int(name.rpartition("-")[2])
            client.order("mix", seconds=seconds, per_s=self._per_s, slice_s=_SLICE_S, seed=seed)

    def leftovers(self) -> dict[str, Any]:
        """What Redis holds once the queues are empty and the worker has stopped."""
        inboxes = [Inbox(Link(self.redis), model) for model in _MODELS]
        give_up_s = time.monotonic() + _EMPTY_S
        while any(_depth(inbox) for inbox in inboxes) and time.monotonic() < give_up_s:
            time.sleep(0.1)
        depths = {inbox.model: _depth(inbox) for inbox in inboxes}
        running = undocumented(self.redis)
        self._worker_stack.close()
        return {
            "stream_entries": sum(depths.values()),
            "rows": sum(inbox.look().rows for inbox in inboxes),
            "keys": sorted({*running, *undocumented(self.redis)}),
            "consumers": sum(_consumers(self.redis, model) for model in _MODELS),
            "key_count": self.redis.dbsize(),
        }


def _depth(inbox: Inbox) -> int:
    state = inbox.look()
    return state.high + state.normal + state.low


def _consumers(connection: redis.Redis, model: str) -> int:
    streams = keys.model_keys(model).streams
    return sum(
        len(connection.xinfo_consumers(stream, keys.GROUP))
        for stream in streams
        if connection.exists(stream)
    )


def _targets(
    growth: dict[str, Growth],
    redis_per_min: float,
    left: dict[str, Any],
    p99_ratio: float,
    outcomes: dict[str, dict[str, int]],
) -> list[Target]:
    targets = []
    for name, one in growth.items():
        targets += [
            Target(f"{name}: RSS MiB/min", one.rss_mib_per_min, most=_MOST_MIB_PER_MIN),
            Target(f"{name}: threads gained", one.threads_grown, most=0),
            Target(f"{name}: open files gained", one.files_grown, most=0),
        ]
    failed = sum(
        count
        for counts in outcomes.values()
        for code, count in counts.items()
        if code not in _EXPECTED
    )
    return [
        *targets,
        Target("Redis used_memory MiB/min", redis_per_min, most=_MOST_MIB_PER_MIN),
        Target("high p99, last minute/first", p99_ratio, most=_MOST_P99_RATIO),
        Target("tasks that failed without being asked to", failed, most=0),
        Target("stream entries left", left["stream_entries"], most=0),
        Target("rows left in the account", left["rows"], most=0),
        Target("keys that docs do not name or that lack an expiry", len(left["keys"]), most=0),
        Target("consumers left", left["consumers"], most=0),
    ]


_EXPECTED = ("ok", "cancelled", "deadline_exceeded", "wrong_shape")


def _p99_minutes(clients: list[list[float]]) -> tuple[float, float]:
    """p99 of the first minute after the first slice, in which everything warms up, and the last."""
    count = int(_MINUTE_S / _SLICE_S)
    first = [ms for slices in clients for ms in slices[1 : count + 1]]
    last = [ms for slices in clients for ms in slices[-count:]]
    return statistics.median(first), statistics.median(last)


def _print(console: Console, growth: dict[str, Growth], from_s: float) -> None:
    table = Table(
        *("process", "RSS MiB", "MiB/min", "threads", "gained", "open files", "gained"),
        title=f"from second {from_s:.0f} on",
    )
    for name, one in growth.items():
        table.add_row(
            name,
            f"{one.rss_mib:.1f}",
            f"{one.rss_mib_per_min:+.2f}",
            *(str(v) for v in (one.threads, one.threads_grown, one.files, one.files_grown)),
        )
    console.print(table)


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=30, help="Seconds of traffic.")] = 600.0,
    per_s: Annotated[float, typer.Option(min=1, help="Tasks/s of each API client.")] = 100.0,
) -> None:
    """Send mixed traffic for a long time and look for whatever grows or is left behind."""
    console = Console(width=110)
    where = machine()
    warn_if_busy(console)
    from_s = min(_WARM_S, seconds / 2)
    try:
        with tempfile.TemporaryDirectory(prefix="trtq-bench-") as folder, ExitStack() as stack:
            soak = Soak(stack, Path(folder), seconds, per_s)
            soak.start()
            watch = soak.run(console)
            left = soak.leftovers()
    except BenchmarkError as failure:
        console.print(str(failure), markup=False, style="red")
        raise typer.Exit(1) from failure
    growth = watch.growth(from_s)
    redis_mib, redis_per_min = watch.redis_memory(from_s)
    first_ms, last_ms = _p99_minutes(soak.p99_ms)
    targets = _targets(growth, redis_per_min, left, last_ms / first_ms, soak.outcomes)
    _print(console, growth, from_s)
    console.print({"outcomes": soak.outcomes, "left": left, "high p99 ms": [first_ms, last_ms]})
    print_targets(console, targets)
    if json_path is not None:
        document = {
            "processes": {name: one._asdict() for name, one in growth.items()},
            "redis_mib": redis_mib,
            "redis_mib_per_min": redis_per_min,
            "high_p99_first_minute_ms": first_ms,
            "high_p99_last_minute_ms": last_ms,
            "high_p99_slices_ms": soak.p99_ms,
            "outcomes": soak.outcomes,
            "left": left,
            "targets": {
                t.key: {"value": t.value, "wanted": t.wanted, "met": t.met} for t in targets
            },
            "seconds": seconds,
            "per_s": per_s,
            "machine": where,
        }
        write_json(json_path, document)
    if not all(target.met for target in targets):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
