"""The workers' Celery app with an engine that takes its time and obeys poison tasks.

`CHAOS_RUN_MS`: how long a batch takes at least, so that faults hit workers in mid-batch.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from typing import Any

import numpy as np

from benchmarks.chaos.model import poison_kind
from workers.app import app
from workers.engines.onnxruntime import OnnxRuntimeEngine

__all__ = ["app"]

_RUN_S = float(os.environ.get("CHAOS_RUN_MS", "15")) / 1000
_run = OnnxRuntimeEngine.run


def _obey(self: Any, slot: Any, rows: int) -> Any:
    time.sleep(_RUN_S)
    kinds = {poison_kind(int(task_id)) for task_id in slot.input_buffer("id", rows, ())}
    if "segfault" in kinds:
        ctypes.string_at(0)
    if "hang" in kinds:
        time.sleep(3600)
    if "raise" in kinds:
        raise ValueError("a poison task")
    outputs = _run(self, slot, rows)
    if "shape" in kinds:
        return {name: np.zeros((rows, 2), np.int64) for name in outputs}
    return outputs


resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
OnnxRuntimeEngine.run = _obey  # type: ignore[method-assign]
