"""A hook that makes every batch take the same time, whatever the machine: capacity is known."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from workers.engines.base import Array

#: Module that a worker's operator allows, and the environment variable of a batch's time in ms.
MODULE = "benchmarks.fixed_time"
BATCH_MS = "BENCH_BATCH_MS"


def postprocess(outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """The model's outputs, BENCH_BATCH_MS later."""
    time.sleep(float(os.environ[BATCH_MS]) / 1000)
    return outputs
