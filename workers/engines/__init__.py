"""What runs a batch: one engine for each kind of model file, behind one protocol (base.py)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from workers.engines.base import Engine

if TYPE_CHECKING:
    from workers.models import ModelConfig

_TENSORRT = "workers.tensorrt.engine"


def make_engine(config: ModelConfig, hook_modules: Sequence[str] = ()) -> Engine:
    """The engine that `config` asks for, with its hooks around it, not yet loaded.

    Hooks are imported from `hook_modules` only. A missing package is `load`'s to report, as
    MissingExtra; so is a hook that is not allowed or cannot be imported, as ConfigError.
    """
    engine = _engine(config)
    if config.preprocess is None and config.postprocess is None:
        return engine
    from workers.engines.hooks import HookedEngine

    return HookedEngine(
        engine,
        config.name,
        config.preprocess,
        config.postprocess,
        allowed=hook_modules,
        max_batch=config.max_batch,
    )


def _engine(config: ModelConfig) -> Engine:
    if config.engine == "onnxruntime":
        from workers.engines.onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(config.path, threads=config.threads, max_batch=config.max_batch)
    # By name, so that workers without a GPU never import it.
    return cast(Engine, importlib.import_module(_TENSORRT).make_engine(config))
