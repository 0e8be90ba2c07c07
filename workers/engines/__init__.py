"""What runs a batch: one engine for each kind of model file, behind one protocol (base.py)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from workers.engines.base import POSTPROCESS, PREPROCESS, Engine
from workers.ranges import NO_RANGES, Ranges

if TYPE_CHECKING:
    from workers.models import ModelConfig

_TENSORRT = "workers.tensorrt.engine"


def make_engine(
    config: ModelConfig, *, hook_modules: Sequence[str] = (), ranges: Ranges = NO_RANGES
) -> Engine:
    """The engine that `config` asks for, not yet loaded, with the model's hooks around it.

    `ranges` shows the hooks and the stages on a device. A missing package is `load`'s to report,
    as MissingExtra. Raises ConfigError for a hook that cannot be imported, or lies in none of
    `hook_modules`.
    """
    engine = _engine(config, ranges)
    before, after = config.preprocess, config.postprocess
    if before is None and after is None:
        return engine
    from workers.engines.hook_functions import load_hook
    from workers.engines.hooks import HookedEngine

    name = config.name
    return HookedEngine(
        engine,
        name,
        None if before is None else load_hook(name, PREPROCESS, before, hook_modules),
        None if after is None else load_hook(name, POSTPROCESS, after, hook_modules),
        max_batch=config.max_batch,
        ranges=ranges,
    )


def _engine(config: ModelConfig, ranges: Ranges) -> Engine:
    if config.engine == "onnxruntime":
        from workers.engines.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(config.path, threads=config.threads, max_batch=config.max_batch)
    # By name, so that workers without a GPU never import it.
    return cast(Engine, importlib.import_module(_TENSORRT).make_engine(config, ranges=ranges))
