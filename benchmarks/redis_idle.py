"""What Redis spends while nothing is submitted: on a worker that waits, on a read of the exporter.

`python -m benchmarks.redis_idle --json FILE`: a real worker of one model, then of four; and the
exporter's look at all queues and workers, with a thousand workers registered.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import redis
import typer
import yaml
from rich.console import Console

from benchmarks.models import write_echo
from benchmarks.peers.loops import PAYLOAD_BYTES
from benchmarks.processes import BenchmarkError, Service
from benchmarks.report import Spread, machine, warn_if_busy, write_json
from producer import keys
from producer.connection import connect
from producer.embedded import EmbeddedRedis
from producer.inbox import Inbox
from producer.link import Link
from producer.status import look
from workers.launch import make_plans

_MODELS = (1, 4)
_WORKERS = 1000


def _spent(connection: redis.Redis) -> tuple[float, float]:
    """Processor time in us and commands of Redis so far."""
    info: Any = connection.info("all")
    cpu_s = float(info["used_cpu_user"]) + float(info["used_cpu_sys"])
    return 1e6 * cpu_s, float(info["total_commands_processed"])


def _write_models(folder: Path, number: int) -> Path:
    models = folder / f"models-{number}"
    models.mkdir()
    for index in range(number):
        model = {"name": f"echo{index}", "path": "../echo.onnx", "max_batch": 64, "threads": 1}
        (models / f"echo{index}.yaml").write_text(yaml.safe_dump(model))
    return models


def _idle(folder: Path, number: int, rounds: int, seconds: float) -> dict[str, list[float]]:
    """For each round, what Redis spends in a second on nobody, and on one worker beyond that."""
    found: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis(appendonly=True))
        connection = stack.enter_context(connect(server.url))

        def rate() -> tuple[float, float]:
            cpu_us, commands = _spent(connection)
            time.sleep(seconds)
            after_us, after = _spent(connection)
            return (after_us - cpu_us) / seconds, (after - commands) / seconds

        def clients() -> float:
            info: Any = connection.info("clients")
            return float(info["connected_clients"])

        nobody, others = [rate() for _ in range(rounds)], clients()
        models = _write_models(folder, number)
        (plan,) = make_plans(["cpu"], redis_url=server.url, models=[models], infer_threads=0)
        worker = stack.enter_context(Service(f"idle-{number}", plan.command, folder, plan.env))
        inbox = Inbox(Link(connection), f"echo{number - 1}")
        worker.wait_until(lambda: inbox.look().workers)
        time.sleep(seconds)
        for alone_us, alone in nobody:
            busy_us, commands = rate()
            found["nobody_us"].append(alone_us)
            found["worker_us"].append(busy_us - alone_us)
            found["worker_commands"].append(commands - alone)
            found["worker_connections"].append(clients() - others)
    return found


def _exporter(rounds: int) -> list[float]:
    """Redis' processor time for one read of the exporter, in us."""
    found = []
    with EmbeddedRedis() as server, connect(server.url) as connection:
        report = {"name": "gpu0@host", "device": "0", "models": ["echo0"], "since_s": 1.0}
        for number in range(_WORKERS):
            connection.set(keys.worker(f"gpu0@host-{number:04}"), json.dumps(report), ex=3600)
        connection.hset(keys.MODELS, "echo0", "{}")
        Inbox(Link(connection), "echo0").ensure_groups()
        for _ in range(rounds):
            before, _ = _spent(connection)
            for _ in range(10):
                status = look(connection)
            found.append((_spent(connection)[0] - before) / 10)
            assert len(status.workers) == _WORKERS
    return found


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of one measurement.")] = 3.0,
) -> None:
    """Measure what Redis spends on those who wait and watch."""
    console, where = Console(width=120), machine()
    warn_if_busy(console)
    document: dict[str, Any] = {"machine": where}
    try:
        with tempfile.TemporaryDirectory(prefix="trtq-bench-") as name:
            write_echo(Path(name) / "echo.onnx", PAYLOAD_BYTES)
            for number in _MODELS:
                found = _idle(Path(name), number, rounds, seconds)
                document[f"models_{number}"] = found
                us, commands = Spread.of(found["worker_us"]), Spread.of(found["worker_commands"])
                console.print(
                    f"an idle worker of {number} models: {us.median:,.0f} us of Redis a second "
                    f"({us.least:,.0f}-{us.most:,.0f}), {commands.median:,.1f} commands a second, "
                    f"{max(found['worker_connections']):.0f} connections"
                )
    except BenchmarkError as failure:
        console.print(str(failure), markup=False, style="red")
        raise typer.Exit(1) from failure
    read = Spread.of(_exporter(rounds))
    document["exporter_us"] = read._asdict()
    console.print(
        f"one read of the exporter with {_WORKERS} workers: {read.median:,.0f} us of Redis "
        f"({read.least:,.0f}-{read.most:,.0f})"
    )
    if json_path is not None:
        write_json(json_path, document)


if __name__ == "__main__":
    typer.run(main)
