"""A worker whose engine fails on marked rows: `celery -A tests.support.faulty_worker`.

A row is marked by its first value: one of `FAULTS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from workers import process
from workers.app import app
from workers.engines.onnxruntime import OnnxRuntimeEngine

__all__ = ["app"]

RAISES, WRONG_SHAPE, WRONG_DTYPE, HANGS, FREEZES, CRASHES = FAULTS = range(250, 256)
WIDTH = 16
_FOREVER_S = 1_000_000

_run = OnnxRuntimeEngine.run


def _fail(self: Any, slot: Any, rows: int) -> Mapping[str, Any]:
    first = slot.input_buffer("x", rows, (WIDTH,))[:, 0]
    outputs = dict(_run(self, slot, rows))
    if RAISES in first:
        raise RuntimeError("the engine does not like this row")
    if WRONG_SHAPE in first:
        return {"sum": outputs["sum"][:, np.newaxis]}
    if WRONG_DTYPE in first:
        return {"sum": outputs["sum"].astype(np.float32)}
    while HANGS in first:
        ctypes.CDLL(None).sleep(_FOREVER_S)
    while FREEZES in first:
        # Unlike CDLL, this keeps the interpreter's lock: no other thread can run.
        ctypes.PyDLL(None).sleep(_FOREVER_S)
    if CRASHES in first:
        ctypes.string_at(0)
    return outputs


OnnxRuntimeEngine.run = _fail  # type: ignore[method-assign]
process._FREEZE_MARGIN_S = 1.0
