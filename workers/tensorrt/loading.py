"""A plan's bytes as a TensorRT engine, with what must live as long."""

from __future__ import annotations

from typing import Any, NamedTuple

from producer.errors import EngineMismatch
from workers.tensorrt.flavor import Flavor, make_logger


class Loaded(NamedTuple):
    """ICudaEngine and its IRuntime and ILogger, which must not go before it."""

    logger: Any
    runtime: Any
    engine: Any


def load_plan(flavor: Flavor, data: bytes, where: str) -> Loaded:
    """Deserializes a plan on the current device; `where` names it in messages.

    Raises EngineMismatch for a plan that is damaged or of another version or GPU.
    """
    with flavor.calls:
        logger = make_logger(flavor)
        runtime = flavor.module.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise EngineMismatch(
            f"{where} cannot be used by {flavor.name} {flavor.version} on this GPU "
            f"({logger.last_errors() or 'no reason given'}): build it again here, with this version"
        )
    return Loaded(logger, runtime, engine)
