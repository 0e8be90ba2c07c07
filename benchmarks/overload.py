"""What a queue does at three times its capacity: bounded, urgent tasks first, none starves.

`python -m benchmarks.overload --json FILE`: a worker whose batches take a fixed time, several
client processes in open loops. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import fixed_time
from benchmarks.models import write_echo
from benchmarks.peers.loops import PAYLOAD_BYTES
from benchmarks.processes import ROOT, BenchmarkError, Driver
from benchmarks.report import (
    Target,
    machine,
    percentile,
    print_targets,
    warn_if_busy,
    write_json,
)
from benchmarks.trtq_worker import trtq_worker
from producer.connection import connect
from producer.embedded import EmbeddedRedis
from producer.inbox import Inbox
from producer.link import Link

_BATCH = 16
_BATCH_MS = 40.0
_QUEUE_ROWS = 1000
_OVERLOAD = 3.0
#: Part of the capacity that urgent tasks ask for.
_URGENT = 0.1
_FLOODS = 2
_PATIENCE_S = 2.0
_LOOK_S = 0.02
_EMPTY_S = 60.0
_OLD_TASKS = 4 * _BATCH


class Overload(NamedTuple):
    """One phase of overload: what the queue held and what became of each client's tasks."""

    most_rows: int
    rows_at_end: int
    recovery_s: float
    urgent: dict[str, Any]
    floods: list[dict[str, Any]]


class Bench:
    """Redis, a worker of known capacity and client processes. Rates are in tasks/s."""

    def __init__(self, stack: ExitStack, folder: Path, seconds: float) -> None:
        self._stack, self._folder, self._seconds = stack, folder, seconds

    def start(self) -> None:
        """Starts all processes and measures the capacity."""
        url = self._stack.enter_context(EmbeddedRedis()).url
        write_echo(self._folder / "echo.onnx", PAYLOAD_BYTES)
        output = {"name": "y", "dtype": "uint8", "shape": [PAYLOAD_BYTES]}
        function = f"{fixed_time.MODULE}:postprocess"
        model = {
            "name": "echo",
            "path": "../echo.onnx",
            "max_batch": _BATCH,
            "threads": 1,
            "queue_max_rows": _QUEUE_ROWS,
            "postprocess": {"function": function, "outputs": [output]},
        }
        env = {
            "TRTQ_HOOK_MODULES": fixed_time.MODULE,
            fixed_time.BATCH_MS: str(_BATCH_MS),
            "PYTHONPATH": str(ROOT),
        }
        self._stack.enter_context(trtq_worker(url, self._folder, model, env=env))
        self._redis = self._stack.enter_context(connect(url))
        self._inbox = Inbox(Link(self._redis), "echo")
        env = {"BENCH_REDIS_URL": url, "BENCH_MODEL": "echo"}
        command = [sys.executable, "-m", "benchmarks.peers.trtq_open"]
        self._urgent, *self._floods = (
            self._stack.enter_context(Driver(name, command, self._folder, env))
            for name in ("urgent", *(f"flood-{i}" for i in range(_FLOODS)))
        )
        answer = self._urgent.ask(
            "saturate", seconds=self._seconds / 2, warm_s=1.0, in_flight=8 * _BATCH
        )
        self.capacity: float = answer["per_s"]

    def unloaded(self) -> dict[str, Any]:
        """Urgent tasks with nothing else in the queue."""
        self._order_urgent()
        return self._answer(self._urgent)

    def overload(self, timeout_s: float) -> Overload:
        """Urgent tasks beside a flood of low ones, which wait `timeout_s` for room."""
        per_s = self.capacity * (_OVERLOAD - _URGENT) / _FLOODS
        for flood in self._floods:
            self._order(flood, per_s, "low", timeout_s)
        self._order_urgent()
        most, rows = self._look_until(time.monotonic() + self._seconds)
        ended_s = time.monotonic()
        most = max(most, self._until_empty(timeout_s))
        recovery_s = time.monotonic() - ended_s
        urgent, *floods = map(self._answer, (self._urgent, *self._floods))
        return Overload(most, rows, recovery_s, urgent, floods)

    def starvation(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Low tasks that wait already, then a flood of urgent ones; what became of both."""
        old, *floods = self._urgent, *self._floods
        per_s = self.capacity * _OVERLOAD / _FLOODS
        for flood in floods:
            self._order(flood, per_s, "high", 0.0)
        # All of them are in the queue long before the flood has filled it.
        old.order("send", tasks=_OLD_TASKS, per_s=1e6, priority="low", timeout_s=0.0)
        self._look_until(time.monotonic() + self._seconds)
        self._until_empty(0.0)
        answers = [self._answer(one) for one in (old, *floods)]
        return answers[0], answers[1:]

    def _order_urgent(self) -> None:
        self._order(self._urgent, self.capacity * _URGENT, "high", 0.0)

    def _order(self, driver: Driver, per_s: float, priority: str, timeout_s: float) -> None:
        tasks = int(per_s * self._seconds)
        driver.order("send", tasks=tasks, per_s=per_s, priority=priority, timeout_s=timeout_s)

    def _answer(self, driver: Driver) -> dict[str, Any]:
        answer: dict[str, Any] = driver.answer(self._seconds + 90)
        return answer

    def _look_until(self, end_s: float) -> tuple[int, int]:
        """Looks at the queue until `end_s`; the most rows in it and the last."""
        most = rows = 0
        while time.monotonic() < end_s:
            rows = self._inbox.look().rows
            most = max(most, rows)
            time.sleep(_LOOK_S)
        return most, rows

    def _until_empty(self, clients_wait_s: float) -> int:
        """Waits until the queue is empty for as long as clients may still be adding."""
        most, give_up_s = 0, time.monotonic() + clients_wait_s + _EMPTY_S
        while rows := self._inbox.look().rows:
            most = max(most, rows)
            if time.monotonic() > give_up_s:
                raise BenchmarkError(f"{rows} rows are left {_EMPTY_S} s after the load ended")
            time.sleep(_LOOK_S)
        return most


def _counted(answers: list[dict[str, Any]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for answer in answers:
        for code, count in answer["outcomes"].items():
            total[code] = total.get(code, 0) + count
    return total


def _p99(answer: dict[str, Any]) -> float:
    return percentile(answer["samples_ms"], 99) if answer["samples_ms"] else float("inf")


def _describe(
    mode: str, patience_s: float, phase: Overload, bench: Bench, unloaded_p99_ms: float
) -> tuple[dict[str, Any], list[Target]]:
    outcomes = _counted(phase.floods)
    sent = sum(answer["tasks"] for answer in phase.floods)
    sent_in_s = max(answer["sent_in_s"] for answer in phase.floods)
    during = [s for a in (*phase.floods, phase.urgent) for s in a["answered_s"] if s <= sent_in_s]
    refused_after_s = [
        answer["refused_after_s"]
        for answer in phase.floods
        if answer["refused_after_s"] is not None
    ]
    # At the end a whole queue is left, and where clients wait they add for `patience_s` more.
    least_s = phase.rows_at_end / bench.capacity + patience_s
    found = {
        "offered_over_capacity": (sent + phase.urgent["tasks"]) / sent_in_s / bench.capacity,
        "most_rows": phase.most_rows,
        "low_outcomes": outcomes,
        "high_outcomes": phase.urgent["outcomes"],
        "high_p50_ms": percentile(phase.urgent["samples_ms"], 50),
        "high_p99_ms": _p99(phase.urgent),
        "low_p50_ms": percentile(
            [ms for answer in phase.floods for ms in answer["samples_ms"]], 50
        ),
        "answered_over_capacity": len(during) / sent_in_s / bench.capacity,
        "recovery_s": phase.recovery_s,
        "least_recovery_s": least_s,
        "first_refusal_after_s": min(refused_after_s, default=None),
    }
    unexplained = sum(count for code, count in outcomes.items() if code not in _ALLOWED)
    urgent_lost = phase.urgent["tasks"] - phase.urgent["outcomes"].get("ok", 0)
    targets = [
        Target(f"{mode}: offered/capacity", found["offered_over_capacity"], least=0.9 * _OVERLOAD),
        Target(f"{mode}: most rows/limit", phase.most_rows / _QUEUE_ROWS, most=1),
        Target(f"{mode}: low tasks without result or QueueFull", unexplained, most=0),
        Target(f"{mode}: high tasks without result", urgent_lost, most=0),
        Target(f"{mode}: high p99/unloaded", found["high_p99_ms"] / unloaded_p99_ms, most=3),
        Target(f"{mode}: answered/capacity", found["answered_over_capacity"], least=0.85),
        Target(f"{mode}: recovery/least possible", phase.recovery_s / least_s, most=1.5),
        Target(f"{mode}: refused low tasks", outcomes.get("queue_full", 0), least=1),
    ]
    if patience_s:
        waited = min(refused_after_s, default=0.0) / patience_s
        targets.append(Target(f"{mode}: shortest wait of a refused/asked", waited, least=1))
    return found, targets


_ALLOWED = ("ok", "queue_full")


def _starvation(
    old: dict[str, Any], floods: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[Target]]:
    flooded_s = min(answer["sent_in_s"] for answer in floods)
    during = [s for s in old["answered_s"] if s < flooded_s]
    found = {
        "low_tasks": old["tasks"],
        "low_outcomes": old["outcomes"],
        "low_answered_during_flood": len(during),
        "last_low_s": max(old["answered_s"], default=None),
        "high_outcomes": _counted(floods),
        "flood_s": flooded_s,
    }
    accepted = old["outcomes"].get("ok", 0)
    share = len(during) / accepted if accepted else 0.0
    targets = [
        Target("starvation: low accepted", accepted, least=1),
        Target("starvation: low answered in the flood/accepted", share, least=1),
    ]
    return found, targets


def _print(console: Console, phases: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "", *phases, title=f"{_OVERLOAD:g} times the capacity, queue of {_QUEUE_ROWS} rows"
    )
    for key in next(iter(phases.values())):
        table.add_row(key, *(_shown(phase.get(key)) for phase in phases.values()))
    console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=4, help="Seconds of each phase.")] = 10.0,
) -> None:
    """Overload a queue, refusing and waiting, and see that it keeps its promises."""
    console = Console(width=110)
    where = machine()
    warn_if_busy(console)
    found: dict[str, Any] = {}
    targets: list[Target] = []
    try:
        with tempfile.TemporaryDirectory(prefix="trtq-bench-") as folder, ExitStack() as stack:
            bench = Bench(stack, Path(folder), seconds)
            bench.start()
            console.print(f"capacity {bench.capacity:.0f} tasks/s")
            unloaded = bench.unloaded()
            unloaded_p99_ms = _p99(unloaded)
            phases: dict[str, dict[str, Any]] = {}
            for mode, patience_s in (("refuse", 0.0), ("wait", _PATIENCE_S)):
                phase = bench.overload(patience_s)
                phases[mode], met = _describe(mode, patience_s, phase, bench, unloaded_p99_ms)
                targets += met
            starved, met = _starvation(*bench.starvation())
            targets += met
    except BenchmarkError as failure:
        console.print(str(failure), markup=False, style="red")
        raise typer.Exit(1) from failure
    found = {
        "capacity_per_s": bench.capacity,
        "unloaded_high_p50_ms": percentile(unloaded["samples_ms"], 50),
        "unloaded_high_p99_ms": unloaded_p99_ms,
        **phases,
        "starvation": starved,
    }
    console.print(f"high, unloaded: p99 {unloaded_p99_ms:.0f} ms")
    _print(console, phases)
    console.print(starved)
    print_targets(console, targets)
    if json_path is not None:
        facts = {t.key: {"value": t.value, "wanted": t.wanted, "met": t.met} for t in targets}
        settings = {"batch": _BATCH, "batch_ms": _BATCH_MS, "queue_max_rows": _QUEUE_ROWS}
        document = {**found, "targets": facts, **settings, "seconds": seconds, "machine": where}
        write_json(json_path, document)
    if not all(target.met for target in targets):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
