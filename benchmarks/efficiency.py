"""How much of the engine is left: rows/s through trtq over rows/s of the same model in a bare loop.

`python -m benchmarks.efficiency --json FILE`: a model of at least 2 ms a batch of 64 rows on one
thread. Bare loop, bulk job and single-row submits alternate; each is compared with the bare loops
just before and after it.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.models import write_layers
from benchmarks.processes import BenchmarkError, Driver
from benchmarks.report import Spread, Target, machine, print_targets, warn_if_busy, write_json
from benchmarks.trtq_worker import TrtqWorker, trtq_worker
from producer.embedded import EmbeddedRedis

_BATCH = 64
_INPUTS = 256
_OUTPUTS = 16
_HIDDEN = 512
_MOST_LAYERS = 200
_CLIENTS = 4
_IN_FLIGHT = 64
_WARM_S = 0.7
_WINDOW = 32
#: Calibration is noisy: what counts is the batch time of the bare loops, which is reported.
_MARGIN = 1.15


class Load(NamedTuple):
    """One measurement through trtq."""

    per_s: float
    ratio: float
    worker_cpu_us: float
    mean_batch: float
    client_cpu_us: float


class Bench:
    """The processes of this benchmark and what they measure."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._model, self._data = folder / "layers.onnx", folder / "rows.npy"
        self._expected, self._output = folder / "expected.npy", folder / "output.npy"
        self.bare: list[float] = []
        self.layers = 0

    def start(self, stack: ExitStack, batch_ms: float) -> None:
        """Fits the model, writes the data, starts Redis, worker and clients, warms them up."""
        command = [sys.executable, "-m", "benchmarks.peers.bare_loop"]
        env = {"BENCH_BATCH": str(_BATCH)}
        self._loop = stack.enter_context(Driver("bare-loop", command, self._folder, env))
        took_ms = self._fit(batch_ms)
        rows = max(4096, int(self._seconds * 1000 / took_ms) * _BATCH)
        random = np.random.default_rng(11)
        np.save(self._data, random.standard_normal((rows, _INPUTS), np.float32))
        self._loop.ask(
            "expect", model=str(self._model), data=str(self._data), output=str(self._expected)
        )
        url = stack.enter_context(EmbeddedRedis()).url
        model = {"name": "layers", "path": "../layers.onnx", "max_batch": _BATCH, "threads": 1}
        self._worker: TrtqWorker = stack.enter_context(
            trtq_worker(url, self._folder, model, bulk_root=self._folder)
        )
        env = {
            "BENCH_REDIS_URL": url,
            "BENCH_MODEL": "layers",
            "BENCH_DATA": str(self._data),
            "BENCH_EXPECTED": str(self._expected),
        }
        command = [sys.executable, "-m", "benchmarks.peers.trtq_rows"]
        self._clients = [
            stack.enter_context(Driver(f"client-{i}", command, self._folder, env))
            for i in range(_CLIENTS)
        ]
        self._submit(0.5)

    def _fit(self, batch_ms: float) -> float:
        """Writes the smallest model that takes `batch_ms`; returns what it takes."""
        layers, took_ms = 2, 0.0
        while layers <= _MOST_LAYERS:
            # A name of its own each: the loop keeps a session per path.
            trial = self._folder / f"layers-{layers}.onnx"
            write_layers(trial, inputs=_INPUTS, hidden=_HIDDEN, layers=layers, outputs=_OUTPUTS)
            took_ms = float(self._loop.ask("batch_ms", model=str(trial), seconds=0.4))
            if took_ms >= _MARGIN * batch_ms:
                trial.rename(self._model)
                self.layers = layers
                return took_ms
            trial.unlink()
            layers = max(layers + 1, int(layers * min(4.0, _MARGIN * batch_ms / took_ms)))
        raise BenchmarkError(f"{_MOST_LAYERS} layers take {took_ms:.2f} ms, not {batch_ms} ms")

    def loop(self) -> float:
        """Rows/s of the bare loop."""
        rate: float = self._loop.ask(
            "rate",
            model=str(self._model),
            data=str(self._data),
            seconds=self._seconds,
            warm_s=0.3,
        )
        self.bare.append(rate)
        return rate

    def bulk(self) -> Load:
        """The whole file as a bulk job."""

        def run() -> tuple[float, int, float]:
            done = self._clients[0].ask("bulk", output=str(self._output), window=_WINDOW)
            return done["per_s"], done["rows"], done["client_cpu_us"]

        return self._load(run)

    def submit(self) -> Load:
        """Single-row submits from all clients at once."""
        return self._load(lambda: self._submit(self._seconds))

    def _submit(self, seconds: float) -> tuple[float, int, float]:
        for client in self._clients:
            client.order("saturate", seconds=seconds, warm_s=_WARM_S, in_flight=_IN_FLIGHT)
        answers = [client.answer() for client in self._clients]
        return (
            sum(a["per_s"] for a in answers),
            sum(a["tasks"] for a in answers),
            sum(a["client_cpu_us"] for a in answers) / len(answers),
        )

    def _load(self, run: Any) -> Load:
        before, totals, cpu_s = self.bare[-1], self._worker.totals(), self._worker.service.cpu_s()
        per_s, rows, client_cpu_us = run()
        cpu_s = self._worker.service.cpu_s() - cpu_s
        after = self._worker.totals(totals.rows + rows)
        bare = (before + self.loop()) / 2
        mean_batch = (after.rows - totals.rows) / (after.batches - totals.batches)
        return Load(per_s, per_s / bare, 1e6 * cpu_s / rows, mean_batch, client_cpu_us)


def _median(loads: list[Load], field: str) -> float:
    return Spread.of([getattr(load, field) for load in loads]).median


def _print(console: Console, bench: Bench, loads: dict[str, list[Load]]) -> None:
    bare = Spread.of(bench.bare)
    model_us = 1e6 / bare.median
    table = Table(
        "",
        "rows/s",
        "over bare loop (min-max)",
        "worker CPU us/row (of which model)",
        "client CPU us/row",
        "mean batch",
        title=f"{bench.layers} layers, {1000 * _BATCH / bare.median:.2f} ms a batch of {_BATCH}",
    )
    table.add_row("bare loop", f"{bare.median:,.0f}", "", f"{model_us:.1f}", "", str(_BATCH))
    for name, measured in loads.items():
        ratio = Spread.of([load.ratio for load in measured])
        table.add_row(
            name,
            f"{_median(measured, 'per_s'):,.0f}",
            f"{ratio.median:.3f} ({ratio.least:.3f}-{ratio.most:.3f})",
            f"{_median(measured, 'worker_cpu_us'):.1f} ({model_us:.1f})",
            f"{_median(measured, 'client_cpu_us'):.1f}",
            f"{_median(measured, 'mean_batch'):.1f}",
        )
    console.print(table)


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of bulk job and submits.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Seconds of one measurement.")] = 3.0,
    batch_ms: Annotated[
        float, typer.Option(min=0.1, help="What a batch of the model takes at least.")
    ] = 2.0,
) -> None:
    """Measure rows/s through trtq over rows/s of the same model in a bare loop."""
    console, where = Console(width=110), machine()
    warn_if_busy(console)
    loads: dict[str, list[Load]] = {"bulk": [], "submit": []}
    try:
        with tempfile.TemporaryDirectory(prefix="trtq-bench-") as folder, ExitStack() as stack:
            bench = Bench(Path(folder), seconds)
            bench.start(stack, batch_ms)
            bench.loop()
            for number in range(rounds):
                console.print(f"round {number + 1} of {rounds}")
                loads["bulk"].append(bench.bulk())
                loads["submit"].append(bench.submit())
    except BenchmarkError as failure:
        console.print(str(failure), markup=False, style="red")
        raise typer.Exit(1) from failure
    _print(console, bench, loads)
    targets = [
        Target("bulk_ratio", _median(loads["bulk"], "ratio"), least=0.92),
        Target("submit_ratio", _median(loads["submit"], "ratio"), least=0.80),
    ]
    print_targets(console, targets)
    if json_path is not None:
        bare = Spread.of(bench.bare).median
        found: dict[str, Any] = {target.key: target.value for target in targets}
        found |= {"bare_rows_per_s": bare, "batch_ms": 1000 * _BATCH / bare}
        for name, measured in loads.items():
            found |= {
                f"{name}_rows_per_s": _median(measured, "per_s"),
                f"{name}_worker_cpu_us_per_task": _median(measured, "worker_cpu_us"),
                f"{name}_client_cpu_us_per_task": _median(measured, "client_cpu_us"),
                f"{name}_mean_batch": _median(measured, "mean_batch"),
            }
        found |= {
            "targets": {t.key: {"wanted": t.wanted, "met": t.met} for t in targets},
            "batch": _BATCH,
            "layers": bench.layers,
            "clients": _CLIENTS,
            "in_flight_per_client": _IN_FLIGHT,
            "rounds": rounds,
            "seconds": seconds,
            "by_round": {name: [load._asdict() for load in loads[name]] for name in loads},
            "bare_by_round": bench.bare,
            "machine": where,
        }
        write_json(json_path, found)


if __name__ == "__main__":
    typer.run(main)
