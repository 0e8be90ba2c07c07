"""What one request costs: trtq beside plain Celery, celery-batches and mosec, in one run.

`python -m benchmarks.overhead --json FILE`: the same payload of 100 bytes and the same model that
does nothing, one Redis, every system in processes of its own, rounds taken in turn.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.models import write_echo
from benchmarks.peers.loops import PAYLOAD_BYTES
from benchmarks.processes import ROOT, BenchmarkError, Driver, Service, make_venv
from benchmarks.report import (
    Spread,
    Target,
    machine,
    percentile,
    print_targets,
    warn_if_busy,
    write_json,
)
from benchmarks.trtq_worker import TrtqWorker, trtq_worker
from producer.embedded import EmbeddedRedis, free_port

_PEER_REQUIREMENTS = [
    "aiohttp>=3.10",
    "celery[redis]<5.7",
    "celery-batches>=0.11",
    "hiredis",
    "mosec>=0.9",
    "msgpack",
    "uvloop",
]
_CELERY_POOLS = {"solo": ["-P", "solo"], "threads": ["-P", "threads", "-c", "8"]}
_CELERY_OPTIONS = [
    "--without-gossip",
    "--without-mingle",
    "--without-heartbeat",
    "--loglevel",
    "warning",
]
_BATCH = 64
_IN_FLIGHT = 256
_WARM_S = 0.7
_IDLE_PAUSE_S = 0.6


class Systems:
    """All systems, running: a client (and its worker, for CPU times) by name."""

    def __init__(self, stack: ExitStack, folder: Path, peers_python: Path) -> None:
        self._stack, self._folder, self._peers = stack, folder, peers_python
        self.clients: dict[str, Driver] = {}
        self.workers: dict[str, Service] = {}
        self._redis = stack.enter_context(EmbeddedRedis())

    def _url(self, database: int) -> str:
        return f"{self._redis.url.rpartition('/')[0]}/{database}"

    def start_celery(self, pool: str) -> None:
        name = f"celery-{pool}"
        self._start_celery(name, "celery_plain", sys.executable, self._url(1), _CELERY_POOLS[pool])

    def start_celery_batches(self) -> None:
        self._start_celery(
            "celery-batches",
            "celery_batches_app",
            str(self._peers),
            self._url(2),
            # The faster of the two pools for it; batches leave little for several threads to do.
            _CELERY_POOLS["solo"],
        )

    def _start_celery(self, name: str, module: str, python: str, url: str, pool: list[str]) -> None:
        module = f"benchmarks.peers.{module}"
        env = {"BENCH_REDIS_URL": url, "BENCH_QUEUE": name}
        command = [python, "-m", "celery", "-A", module, "worker", "-n", f"{name}@bench"]
        command += ["-Q", name, *pool, *_CELERY_OPTIONS]
        self._add(name, Service(f"{name}-worker", command, self._folder, env))
        self._add_client(name, [python, "-m", module], env)

    def start_mosec(self) -> None:
        port = str(free_port())
        command = [str(self._peers), "-m", "benchmarks.peers.mosec_server"]
        command += ["--address", "127.0.0.1", "--port", port, "--log-level", "warning"]
        command += ["--path", str(self._folder / "mosec")]
        self._add("mosec", Service("mosec-server", command, self._folder))
        self.workers["mosec-aiohttp"] = self.workers["mosec"]
        for name, module in (("mosec", "mosec_client"), ("mosec-aiohttp", "mosec_aiohttp")):
            command = [str(self._peers), "-m", f"benchmarks.peers.{module}"]
            self._add_client(name, command, {"BENCH_MOSEC_PORT": port})

    def start_trtq(self) -> TrtqWorker:
        write_echo(self._folder / "echo.onnx", PAYLOAD_BYTES)
        model = {"name": "echo", "path": "../echo.onnx", "max_batch": _BATCH, "threads": 1}
        worker = self._stack.enter_context(trtq_worker(self._url(0), self._folder, model))
        self.workers["trtq"] = worker.service
        env = {"BENCH_REDIS_URL": self._url(0), "BENCH_MODEL": "echo"}
        self._add_client("trtq", [sys.executable, "-m", "benchmarks.peers.trtq_echo"], env)
        return worker

    def _add(self, name: str, service: Service) -> None:
        self._stack.enter_context(service)
        self.workers[name] = service

    def _add_client(self, name: str, command: list[str], env: dict[str, str]) -> None:
        client = Driver(f"{name}-client", command, self._folder, env)
        self._stack.enter_context(client)
        self.clients[name] = client


class Measured:
    """What all rounds gave, by system."""

    def __init__(self) -> None:
        self.per_s: dict[str, list[float]] = defaultdict(list)
        self.worker_cpu_us: dict[str, list[float]] = defaultdict(list)
        self.client_cpu_us: dict[str, list[float]] = defaultdict(list)
        self.serial_ms: dict[str, list[list[float]]] = defaultdict(list)
        self.idle_ms: dict[str, list[list[float]]] = defaultdict(list)
        self.mean_batch: list[float] = []


def _saturate(
    systems: Systems, name: str, seconds: float, measured: Measured, trtq: TrtqWorker
) -> None:
    worker = systems.workers[name]
    totals = trtq.totals() if name == "trtq" else None
    cpu_s = worker.cpu_s()
    answer = systems.clients[name].ask(
        "saturate", seconds=seconds, warm_s=_WARM_S, in_flight=_IN_FLIGHT
    )
    cpu_s = worker.cpu_s() - cpu_s
    worker.check()
    measured.per_s[name].append(answer["per_s"])
    measured.client_cpu_us[name].append(answer["client_cpu_us"])
    measured.worker_cpu_us[name].append(1e6 * cpu_s / answer["tasks"])
    if totals is not None:
        after = trtq.totals(totals.rows + answer["tasks"])
        measured.mean_batch.append((after.rows - totals.rows) / (after.batches - totals.batches))


def _round(
    systems: Systems, number: int, seconds: float, measured: Measured, trtq: TrtqWorker
) -> None:
    names = list(systems.clients)
    # Each round begins with another system, so that no one always runs on the warmest machine.
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
        client = systems.clients[name]
        _saturate(systems, name, seconds, measured, trtq)
        if name.startswith("celery-") and name != "celery-batches":
            measured.serial_ms[name].append(client.ask("serial", seconds=seconds)["samples_ms"])
            idle = client.ask("idle", seconds=2 * seconds, pause_s=_IDLE_PAUSE_S)
            measured.idle_ms[name].append(idle["samples_ms"])
        elif name == "trtq":
            measured.serial_ms[name].append(client.ask("serial", seconds=seconds)["samples_ms"])
            idle = client.ask("idle", seconds=4 * seconds)
            measured.idle_ms[name].append(idle["samples_ms"])


def _warm_up(systems: Systems) -> None:
    for client in systems.clients.values():
        client.ask("saturate", seconds=0.3, warm_s=0.2, in_flight=_IN_FLIGHT)


def _pooled(rounds: list[list[float]], percent: float) -> float:
    return percentile([sample for samples in rounds for sample in samples], percent)


def _summary(measured: Measured, plain: list[str]) -> tuple[dict[str, Any], list[Target]]:
    rate = {name: Spread.of(values).median for name, values in measured.per_s.items()}
    pool = max(plain, key=lambda name: rate[name])
    # Latency is compared with the quicker pool, even where it is not the one with the higher rate.
    quick = min(plain, key=lambda name: _pooled(measured.serial_ms[name], 50))
    found: dict[str, Any] = {
        "celery_per_s": rate[pool],
        "celery_batches_per_s": rate.get("celery-batches"),
        "mosec_per_s": rate.get("mosec"),
        "mosec_aiohttp_per_s": rate.get("mosec-aiohttp"),
        "trtq_per_s": rate["trtq"],
        "celery_pool": pool.removeprefix("celery-"),
        "celery_serial_pool": quick.removeprefix("celery-"),
    }
    for prefix, rounds in (
        ("celery_serial", measured.serial_ms[quick]),
        ("celery_idle", measured.idle_ms[quick]),
        ("trtq_serial", measured.serial_ms["trtq"]),
        ("trtq_idle", measured.idle_ms["trtq"]),
    ):
        for percent in (50, 99):
            found[f"{prefix}_p{percent}_ms"] = _pooled(rounds, percent)
    found["worker_cpu_us_per_task"] = Spread.of(measured.worker_cpu_us["trtq"]).median
    found["mean_batch"] = Spread.of(measured.mean_batch).median

    def over(key: str) -> float | None:
        return found["trtq_per_s"] / found[key] if found[key] else None

    targets = [
        Target("trtq_over_celery", over("celery_per_s"), least=30),
        Target("trtq_over_celery_batches", over("celery_batches_per_s"), least=20),
        Target("trtq_over_mosec", over("mosec_per_s"), least=1),
        Target(
            "serial_ratio", found["trtq_serial_p50_ms"] / found["celery_serial_p50_ms"], most=0.25
        ),
        Target("idle_ratio", found["trtq_idle_p50_ms"] / found["celery_serial_p50_ms"], most=1.5),
    ]
    found.update({target.key: target.value for target in targets})
    return found, targets


def _print(console: Console, measured: Measured, found: dict[str, Any]) -> None:
    table = Table(
        "system",
        "tasks/s (min-max)",
        "worker CPU us/task",
        "client CPU us/task",
        "serial p50/p99 ms",
        "from idle p50/p99 ms",
        title=f"{PAYLOAD_BYTES}-byte payload, no-op model, {_IN_FLIGHT} in flight from one client",
    )
    for name, values in measured.per_s.items():
        rate = Spread.of(values)
        latencies = [
            f"{_pooled(rounds, 50):.2f} / {_pooled(rounds, 99):.2f}" if rounds else ""
            for rounds in (measured.serial_ms.get(name, []), measured.idle_ms.get(name, []))
        ]
        table.add_row(
            name,
            f"{rate.median:,.0f} ({rate.least:,.0f}-{rate.most:,.0f})",
            f"{Spread.of(measured.worker_cpu_us[name]).median:,.0f}",
            f"{Spread.of(measured.client_cpu_us[name]).median:,.0f}",
            *latencies,
        )
    console.print(table)
    console.print(
        f"trtq's worker: {found['worker_cpu_us_per_task']:.0f} us of CPU a task, "
        f"mean batch {found['mean_batch']:.1f}. mosec's client: uvloop, a raw HTTP/1.1 "
        f"protocol that sends prepared bytes on {_IN_FLIGHT} kept-alive connections; "
        "mosec-aiohttp is an ordinary client of the same server."
    )


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of every system.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.2, help="Seconds of one measurement.")] = 2.0,
    venv: Annotated[
        Path, typer.Option(help="Virtualenv of celery-batches and mosec, made if missing.")
    ] = ROOT / "build" / "bench-venv",
    without: Annotated[
        list[str] | None, typer.Option(help="Leave out celery-batches or mosec.")
    ] = None,
) -> None:
    """Measure the cost of one request, beside plain Celery, celery-batches and mosec."""
    console, left_out = Console(width=110), set(without or [])
    if left_out - {"celery-batches", "mosec"}:
        raise typer.BadParameter(f"--without {sorted(left_out)}: celery-batches or mosec")
    where, measured = machine(), Measured()
    warn_if_busy(console)
    plain = [f"celery-{pool}" for pool in _CELERY_POOLS]
    try:
        python = Path(sys.executable)
        if left_out != {"celery-batches", "mosec"}:
            python = make_venv(venv, _PEER_REQUIREMENTS)
        with tempfile.TemporaryDirectory(prefix="trtq-bench-") as folder, ExitStack() as stack:
            systems = Systems(stack, Path(folder), python)
            for pool in _CELERY_POOLS:
                systems.start_celery(pool)
            if "celery-batches" not in left_out:
                systems.start_celery_batches()
            if "mosec" not in left_out:
                systems.start_mosec()
            trtq = systems.start_trtq()
            _warm_up(systems)
            for number in range(rounds):
                console.print(f"round {number + 1} of {rounds}")
                _round(systems, number, seconds, measured, trtq)
    except BenchmarkError as failure:
        console.print(str(failure), markup=False, style="red")
        raise typer.Exit(1) from failure
    found, targets = _summary(measured, plain)
    _print(console, measured, found)
    print_targets(console, targets)
    if json_path is not None:
        details = {key: dict(getattr(measured, key)) for key in ("per_s", "worker_cpu_us")}
        write_json(
            json_path,
            {
                **found,
                "targets": {t.key: {"wanted": t.wanted, "met": t.met} for t in targets},
                "payload_bytes": PAYLOAD_BYTES,
                "in_flight": _IN_FLIGHT,
                "rounds": rounds,
                "seconds": seconds,
                "by_round": details,
                "client_cpu_us_per_task": {
                    name: Spread.of(values).median
                    for name, values in measured.client_cpu_us.items()
                },
                "machine": where,
            },
        )


if __name__ == "__main__":
    typer.run(main)
