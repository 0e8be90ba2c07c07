"""What runs a batch: one engine for each kind of model file, behind one protocol (base.py)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from workers.engines.base import Engine
from workers.ranges import NO_RANGES, Ranges

if TYPE_CHECKING:
    from workers.models import ModelConfig

_TENSORRT = "workers.tensorrt.engine"


def make_engine(config: ModelConfig, *, ranges: Ranges = NO_RANGES) -> Engine:
    """The engine that `config` asks for, not yet loaded; `ranges` shows its stages on a device.

    A missing package is `load`'s to report, as MissingExtra.
    """
    if config.engine == "onnxruntime":
        from workers.engines.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(config.path, threads=config.threads, max_batch=config.max_batch)
    # By name, so that workers without a GPU never import it.
    return cast(Engine, importlib.import_module(_TENSORRT).make_engine(config, ranges=ranges))
