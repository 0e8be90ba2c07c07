"""What `trtq build` and `trtq inspect` run; the command line calls it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from producer.errors import MissingExtra, NoDevice
from workers.models import load_model
from workers.tensorrt.cache import default_cache, write_atomically
from workers.tensorrt.device import Device, current_device
from workers.tensorrt.flavor import find_flavor
from workers.tensorrt.inspect import inspect_plan
from workers.tensorrt.options import BuildOptions
from workers.tensorrt.provide import provide_plan, read_plan


def build(model: Path, max_batch: int, output: Path | None) -> dict[str, Any]:
    """Builds the plan of a model file (.yaml) or an ONNX file, as a worker here would.

    `max_batch` counts for an ONNX file alone. Without a GPU the plan is for all GPUs that TensorRT
    for RTX knows. Raises what provide_plan and load_model raise.
    """
    options, path = BuildOptions(), model
    if model.suffix.lower() in (".yaml", ".yml"):
        config = load_model(model)
        options, path, max_batch = config.build, config.path, config.max_batch
    device = _device()
    plan = provide_plan(path, max_batch, options, device, default_cache())
    if output is not None:
        write_atomically(output, plan.data)
    return {
        "plan": str(output or plan.path),
        "key": plan.key,
        "from_cache": plan.from_cache,
        "size_bytes": len(plan.data),
        "gpu": "any" if device is None else device.name,
    }


def inspect(engine: Path) -> dict[str, Any]:
    """What a plan holds; raises ModelFileError, EngineMismatch, MissingExtra."""
    return inspect_plan(find_flavor(), read_plan(engine).data, str(engine))


def _device() -> Device | None:
    try:
        return current_device()
    except (MissingExtra, NoDevice):
        return None
