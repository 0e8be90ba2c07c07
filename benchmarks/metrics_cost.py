"""What measuring costs: the same worker with and without it, in one run, rounds taken in turn.

`python -m benchmarks.metrics_cost --json FILE`: "with" is the worker as it is, its metrics read
once a second; "without" records no stage and has no port.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import urllib.request
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from benchmarks.models import write_echo
from benchmarks.peers.loops import PAYLOAD_BYTES
from benchmarks.processes import BenchmarkError, Driver, Service
from benchmarks.report import Spread, Target, machine, print_targets, warn_if_busy, write_json
from producer.connection import connect
from producer.embedded import EmbeddedRedis, free_port
from producer.inbox import Inbox
from producer.link import Link
from workers.devices import CPU
from workers.launch import make_plans

_IN_FLIGHT = 256
_SCRAPE_S = 1.0


class Scraper:
    """Reads a metrics page once a second until closed, as Prometheus would, only more often."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.pages = 0

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(_SCRAPE_S):
            with urllib.request.urlopen(self._url, timeout=5) as answer:
                self.pages += b"trtq_rows_total" in answer.read()


def _start(
    stack: ExitStack, folder: Path, url: str, name: str, port: int
) -> tuple[Service, Driver]:
    models = folder / name
    models.mkdir()
    model = {"name": "echo", "path": "../echo.onnx", "max_batch": 64, "threads": 1}
    (models / "echo.yaml").write_text(yaml.safe_dump(model))
    (plan,) = make_plans([CPU], redis_url=url, models=[models], infer_threads=0)
    command, env = list(plan.command), {**plan.env, "TRTQ_METRICS_PORT": str(port)}
    if not port:
        command[1:3] = ["-m", "benchmarks.peers.unmeasured"]
    worker = stack.enter_context(Service(f"worker-{name}", command, folder, env))
    inbox = Inbox(Link(stack.enter_context(connect(url))), "echo")
    worker.wait_until(lambda: inbox.look().workers)
    client = [sys.executable, "-m", "benchmarks.peers.trtq_echo"]
    env = {"BENCH_REDIS_URL": url, "BENCH_MODEL": "echo"}
    driver: Driver = stack.enter_context(Driver(f"client-{name}", client, folder, env))
    return worker, driver


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 40,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds of one measurement.")] = 0.6,
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
            scraper = stack.enter_context(Scraper(f"http://127.0.0.1:{port}/metrics"))
            for number in range(rounds + 1):
                order = ["with", "without"] if number % 2 else ["without", "with"]
                for kind in order:
                    worker, driver = systems[kind]
                    cpu_s = worker.cpu_s()
                    answer = driver.ask(
                        "saturate", seconds=seconds, warm_s=0.2, in_flight=_IN_FLIGHT
                    )
                    if number:  # the first round warms up
                        per_s[kind].append(answer["per_s"])
                        cpu_us[kind].append(1e6 * (worker.cpu_s() - cpu_s) / answer["tasks"])
            pages = scraper.pages
    except BenchmarkError as failure:
        console.print(str(failure), markup=False, style="red")
        raise typer.Exit(1) from failure
    ratios = [a / b for a, b in zip(per_s["with"], per_s["without"], strict=True)]
    cpu = [a / b for a, b in zip(cpu_us["with"], cpu_us["without"], strict=True)]
    ratio, cpu_ratio = Spread.of(ratios), Spread.of(cpu)
    for kind, values in per_s.items():
        spread = Spread.of(values)
        console.print(
            f"{kind}: {spread.median:,.0f} tasks/s ({spread.least:,.0f}-{spread.most:,.0f}), "
            f"worker CPU {Spread.of(cpu_us[kind]).median:.2f} us/task"
        )
    console.print(f"ratio by round: {' '.join(f'{r:.3f}' for r in ratios)}; {pages} pages read")
    targets = [
        Target("throughput_with_over_without", ratio.median, least=0.98),
        Target("worker_cpu_with_over_without", cpu_ratio.median, most=1.02),
    ]
    print_targets(console, targets)
    if json_path is not None:
        document: dict[str, Any] = {
            "throughput_with_over_without": ratio.median,
            "worker_cpu_with_over_without": cpu_ratio.median,
            "cpu_us_by_round": dict(cpu_us),
            "by_round": dict(per_s),
            "ratios": ratios,
            "machine": where,
        }
        write_json(json_path, document)


if __name__ == "__main__":
    typer.run(main)
