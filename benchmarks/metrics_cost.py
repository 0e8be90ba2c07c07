"""What measuring costs: the same worker with and without it, in one run, rounds taken in turn.

`python -m benchmarks.metrics_cost --json FILE`: "with" is the worker as it is and `trtq exporter`,
both read every `--read-every-s` seconds of load; "without" records no stage and has no port.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.models import write_echo
from benchmarks.peers.loops import PAYLOAD_BYTES
from benchmarks.processes import BenchmarkError, Driver, Service
from benchmarks.report import Spread, Target, machine, print_targets, warn_if_busy, write_json
from benchmarks.trtq_worker import trtq_worker
from producer.embedded import EmbeddedRedis, free_port

_IN_FLIGHT = 256
_WARM_S = 0.2


class Scraper:
    """Reads metrics pages after every `every_s` seconds of load, as Prometheus would."""

    def __init__(self, urls: Sequence[str], every_s: float) -> None:
        self._urls = urls
        self._every_s = every_s
        self._since_s = 0.0
        self.pages = 0

    def under_load(self, seconds: float) -> None:
        """Reads them now if they are due; there will be `seconds` of load in all."""
        self._since_s += seconds
        if self._since_s < self._every_s:
            return
        self._since_s -= self._every_s
        for url in self._urls:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if b"\ntrtq_" not in answer.read():
                    raise BenchmarkError(f"{url} has no metrics of trtq")
            self.pages += 1


def _exporter(stack: ExitStack, folder: Path, url: str) -> str:
    port = free_port()
    command = [sys.executable, "-m", "producer.cli", "exporter", "--port", str(port)]
    exporter = stack.enter_context(Service("exporter", command, folder, {"TRTQ_REDIS_URL": url}))
    exporter.wait_until(lambda: _listens(port))
    return f"http://127.0.0.1:{port}/metrics"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _start(
    stack: ExitStack, folder: Path, url: str, name: str, port: int
) -> tuple[Service, Driver]:
    place = folder / name
    place.mkdir()
    model = {"name": "echo", "path": str(folder / "echo.onnx"), "max_batch": 64, "threads": 1}
    module = "celery" if port else "benchmarks.peers.unmeasured"
    worker = stack.enter_context(trtq_worker(url, place, model, metrics_port=port, module=module))
    client = [sys.executable, "-m", "benchmarks.peers.trtq_echo"]
    env = {"BENCH_REDIS_URL": url, "BENCH_MODEL": "echo"}
    driver: Driver = stack.enter_context(Driver(f"client-{name}", client, folder, env))
    return worker.service, driver


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 150,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds of one measurement.")] = 0.6,
    read_every_s: Annotated[
        float, typer.Option(min=0.1, help="Load between reads; configs/prometheus has 10 s.")
    ] = 10.0,
) -> None:
    """Measure what metrics cost in throughput."""
    console, where = Console(width=110), machine()
    warn_if_busy(console)
    per_s: dict[str, list[float]] = defaultdict(list)
    cpu_us: dict[str, list[float]] = defaultdict(list)
    port = free_port()
    try:
        with tempfile.TemporaryDirectory(prefix="trtq-bench-") as name, ExitStack() as stack:
            folder, server = Path(name), stack.enter_context(EmbeddedRedis())
            base = server.url.rpartition("/")[0]
            write_echo(folder / "echo.onnx", PAYLOAD_BYTES)
            systems = {
                "with": _start(stack, folder, f"{base}/0", "with", port),
                "without": _start(stack, folder, f"{base}/1", "without", 0),
            }
            urls = [f"http://127.0.0.1:{port}/metrics", _exporter(stack, folder, f"{base}/0")]
            scraper = Scraper(urls, read_every_s)
            for number in range(rounds + 1):
                order = ["with", "without"] if number % 2 else ["without", "with"]
                for kind in order:
                    worker, driver = systems[kind]
                    cpu_s = worker.cpu_s()
                    driver.order("saturate", seconds=seconds, warm_s=_WARM_S, in_flight=_IN_FLIGHT)
                    if kind == "with":
                        # After the warm-up, so that what is measured holds it.
                        time.sleep(2 * _WARM_S)
                        scraper.under_load(seconds)
                    answer = driver.answer()
                    if number:  # the first round warms up
                        per_s[kind].append(answer["per_s"])
                        cpu_us[kind].append(1e6 * (worker.cpu_s() - cpu_s) / answer["tasks"])
    except BenchmarkError as failure:
        console.print(str(failure), markup=False, style="red")
        raise typer.Exit(1) from failure
    # Of the totals: a page is read in few rounds, which a median would not see.
    throughput = sum(per_s["with"]) / sum(per_s["without"])
    cpu = sum(cpu_us["with"]) / sum(cpu_us["without"])
    for kind, values in per_s.items():
        spread = Spread.of(values)
        console.print(
            f"{kind}: {spread.median:,.0f} tasks/s ({spread.least:,.0f}-{spread.most:,.0f}), "
            f"worker CPU {Spread.of(cpu_us[kind]).median:.2f} us/task"
        )
    console.print(f"{scraper.pages} pages read in {len(per_s['with'])} rounds")
    targets = [
        Target("throughput_with_over_without", throughput, least=0.98),
        Target("worker_cpu_with_over_without", cpu, most=1.02),
    ]
    print_targets(console, targets)
    if json_path is not None:
        document: dict[str, Any] = {
            "throughput_with_over_without": throughput,
            "worker_cpu_with_over_without": cpu,
            "cpu_us_by_round": dict(cpu_us),
            "by_round": dict(per_s),
            "pages": scraper.pages,
            "machine": where,
        }
        write_json(json_path, document)


if __name__ == "__main__":
    typer.run(main)
