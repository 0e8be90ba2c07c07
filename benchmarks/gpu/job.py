"""What runs of the whole system share: the images on disk, the model's configuration, clients."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.subject import Subject
from benchmarks.processes import Driver

BATCH = 128
_DISTINCT = 2048
_WINDOW = 32


class Job(NamedTuple):
    """Images in `data`, torch's answers in `expected`; an element may differ by `tolerance`."""

    subject: Subject
    folder: Path
    data: Path
    expected: Path
    images: int
    tolerance: float

    def model(self, slots: int) -> dict[str, Any]:
        """The configuration of the model for a worker."""
        return {
            "name": "resnet50",
            "engine": "tensorrt",
            "path": str(self.subject.path),
            "max_batch": BATCH,
            "slots": slots,
            "queue_max_bytes": 2 << 30,
            "build": {
                "profiles": [{"min_batch": 1, "opt_batch": b, "max_batch": b} for b in (32, BATCH)]
            },
        }

    @contextmanager
    def drivers(self, url: str, clients: int) -> Iterator[list[Driver]]:
        """Client processes that compare every answer."""
        env = {
            "BENCH_REDIS_URL": url,
            "BENCH_MODEL": "resnet50",
            "BENCH_DATA": str(self.data),
            "BENCH_EXPECTED": str(self.expected),
            "BENCH_TOLERANCE": str(self.tolerance),
        }
        command = [sys.executable, "-m", "benchmarks.peers.trtq_rows"]
        with ExitStack() as stack:
            yield [
                stack.enter_context(Driver(f"client-{i}", command, self.folder, env))
                for i in range(clients)
            ]

    def bulk(self, driver: Driver, workers: int = 1) -> dict[str, Any]:
        """One bulk job over all images, for so many worker processes."""
        output = str(self.folder / "output.npy")
        done: dict[str, Any] = driver.ask("bulk", output=output, window=_WINDOW * workers)
        return done


def make_job(subject: Subject, folder: Path, images: int) -> Job:
    """Distinct images repeated to `images` rows, and what torch says of them."""
    data, expected = folder / "images.npy", folder / "expected.npy"
    random = np.random.default_rng(7)
    rows = subject.rows(_DISTINCT, 7)
    # Noise alone looks the same to the network: brightness tells the images apart.
    light = random.uniform(0.05, 1.0, (_DISTINCT, 1, 1, 3)).astype(np.float32)
    rows = (rows * light).astype(np.uint8)
    wanted = np.concatenate([subject.expected(part) for part in np.array_split(rows, 16)])
    copies = -(-images // _DISTINCT)
    target = np.lib.format.open_memmap(data, "w+", np.uint8, (images, *subject.row))
    for number in range(copies):
        part = target[number * _DISTINCT : (number + 1) * _DISTINCT]
        part[...] = rows[: len(part)]
    target.flush()
    np.save(expected, np.concatenate([wanted] * copies)[:images])
    tolerance = float(np.abs(wanted).max()) * 0.01
    return Job(subject, folder, data, expected, images, tolerance)
