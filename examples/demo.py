"""A tour on this machine: Redis, one CPU worker, a bulk job, three single tasks.

Run it with `make demo`. Everything that it starts ends with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from producer import Client
from producer.connection import connect
from producer.embedded import EmbeddedRedis
from producer.status import look

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "demo-output"
MODEL = "digits"
WANTED_ACCURACY = 0.97
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Runs the tour; returns the exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    with ExitStack() as running:
        try:
            return tour(running)
        except KeyboardInterrupt:
            print("\ninterrupted: stopping the worker and Redis", file=sys.stderr)
            return 130
        finally:
            # What follows ends by itself in seconds; a second Ctrl-C would leave it half done.
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def tour(running: ExitStack) -> int:
    """The steps. `running` ends what they start."""
    OUTPUT.mkdir(exist_ok=True)
    images, labels = test_half()
    rows, results = OUTPUT / "digits-test.npy", OUTPUT / "digits-scores.npy"
    np.save(rows, images)

    print("starting Redis and one CPU worker ...", flush=True)
    with uninterrupted():
        redis_url = running.enter_context(EmbeddedRedis()).url
    running.enter_context(worker(redis_url))
    client = running.enter_context(Client(redis_url))

    print(f"bulk job: {len(images)} images through the model {MODEL!r}", flush=True)
    summary = bulk(redis_url, rows, results)
    scores = np.load(results)
    accuracy = float((scores.argmax(axis=1) == labels).mean())
    print(f"  accuracy     {accuracy:.4f}  ({len(labels)} images it has not been trained on)")
    print(f"  speed        {summary['tasks'] / summary['seconds']:,.0f} tasks/s,", end=" ")
    print(f"{summary['rows_per_s']:,.0f} rows/s")
    print(f"  mean batch   {mean_batch(redis_url, len(images)):.1f} rows")
    print(f"  results      {results}", flush=True)

    print("three single tasks:")
    tickets = [client.submit(MODEL, image) for image in images[:3]]
    for ticket, label in zip(tickets, labels, strict=False):
        row = ticket.result(timeout=10)
        print(f"  {ticket.task_id}: a {row.argmax()} (it is a {label}), scores {np.round(row, 2)}")
    if accuracy < WANTED_ACCURACY:
        print(f"accuracy {accuracy:.4f} is below {WANTED_ACCURACY}", file=sys.stderr)
        return 1
    return 0


def test_half() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images, float32 of shape (rows, 1, 8, 8) and values 0..16, and their digits."""
    digits = load_digits()
    half = len(digits.images) // 2
    return digits.images[half:, None].astype(np.float32), digits.target[half:]


@contextmanager
def worker(redis_url: str) -> Iterator[None]:
    """`trtq worker` as a process of its own, ready when this returns."""
    log = OUTPUT / "worker.log"
    command = ["worker", "--devices", "cpu", "--infer-threads", "0", "--name", "demo"]
    command += ["--models", str(ROOT / "configs/models"), "--bulk-root", str(OUTPUT)]
    with log.open("wb") as output, trtq(command, redis_url, output, output) as process:

        def ready() -> bool:
            if process.poll() is not None:
                raise SystemExit(f"the worker ended with {process.returncode}, see {log}")
            with connect(redis_url) as connection:
                return bool(look(connection).workers)

        until(ready, 60, f"the worker was not ready, see {log}")
        yield


def bulk(redis_url: str, rows: Path, results: Path) -> dict[str, Any]:
    """`trtq bulk`, with its progress bar; returns its summary."""
    command = ["bulk", MODEL, str(rows), str(results), "--overwrite", "--json"]
    command += ["--rows-per-task", "4", "--window", "128"]
    with trtq(command, redis_url, subprocess.PIPE, None) as process:
        printed, _ = process.communicate(timeout=60)
    if process.returncode:
        raise SystemExit(f"trtq bulk ended with {process.returncode}")
    summary: dict[str, Any] = json.loads(printed)
    return summary


def mean_batch(redis_url: str, rows: int) -> float:
    """Rows per batch, as the worker reports once a second."""
    with connect(redis_url) as connection:

        def counted() -> Any:
            return next((w for w in look(connection).workers if w["rows"] >= rows), None)

        report = until(counted, 10, "the worker did not report")
    return float(report["rows"] / report["batches"])


@contextmanager
def trtq(
    arguments: list[str], redis_url: str, stdout: Any, stderr: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The command `trtq` of this very Python, stopped at the end."""
    process = None
    try:
        with uninterrupted():
            process = subprocess.Popen(
                [sys.executable, "-m", "producer.cli", *arguments],
                env={**os.environ, "TRTQ_REDIS_URL": redis_url},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # A Ctrl-C is ours to pass on, once.
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            stop(process)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds a stop back until what is being started is known, and so can be stopped."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: arrived.append(number))
        for number in STOP_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        raise KeyboardInterrupt


def until(condition: Callable[[], Any], seconds: float, failure: str) -> Any:
    """The first true value of `condition`, or SystemExit(failure)."""
    give_up_s = time.monotonic() + seconds
    while time.monotonic() < give_up_s:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise SystemExit(failure)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks to finish, asks to end at once, ends."""
    for end in (process.terminate, process.terminate, process.kill):
        if process.poll() is None:
            end()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                continue


if __name__ == "__main__":
    sys.exit(main())
