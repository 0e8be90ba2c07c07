"""A worker that loses its device after warming: `celery -A tests.support.dying_worker`."""

from __future__ import annotations

from typing import Any

from producer.errors import DeviceLost
from workers.app import app
from workers.engines.onnxruntime import OnnxRuntimeEngine

__all__ = ["app"]


_run = OnnxRuntimeEngine.run
_WARMED = ("slow", "checksum")
_runs: list[int] = []


def _lose(self: Any, slot: Any, rows: int) -> Any:
    _runs.append(rows)
    # Each model has one slot, which is warmed with two sizes.
    if len(_runs) <= 2 * len(_WARMED):
        return _run(self, slot, rows)
    raise DeviceLost("the GPU failed at a copy: uncorrectable ECC error")


OnnxRuntimeEngine.run = _lose  # type: ignore[method-assign]
