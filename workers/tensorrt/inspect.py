"""What a plan holds: bindings, profiles, layers and memory."""

from __future__ import annotations

import json
from typing import Any

from workers.tensorrt.flavor import Flavor
from workers.tensorrt.loading import load_plan


def inspect_plan(flavor: Flavor, data: bytes, where: str) -> dict[str, Any]:
    """Facts of the plan `where`, ready for JSON. Shapes have the batch axis first, -1 is dynamic.

    Needs the GPU that the plan is for; raises EngineMismatch where it cannot be loaded.
    """
    trt = flavor.module
    engine = load_plan(flavor, data, where).engine
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    information = engine.create_engine_inspector().get_engine_information(
        trt.LayerInformationFormat.JSON
    )
    return {
        "flavor": flavor.name,
        "version": flavor.version,
        "size_bytes": len(data),
        "device_memory_bytes": int(engine.device_memory_size_v2),
        "bindings": [
            {
                "name": name,
                "kind": "input" if name in inputs else "output",
                "dtype": str(engine.get_tensor_dtype(name)).rpartition(".")[2].lower(),
                "shape": list(engine.get_tensor_shape(name)),
            }
            for name in names
        ],
        "profiles": [
            {
                name: [list(shape) for shape in engine.get_tensor_profile_shape(name, index)]
                for name in inputs
            }
            for index in range(engine.num_optimization_profiles)
        ],
        "layers": _layers(information, int(engine.num_layers)),
    }


def _layers(information: str, count: int) -> list[str]:
    try:
        found = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError):
        return [f"layer {index}" for index in range(count)]
    return [str(layer.get("Name", layer)) if isinstance(layer, dict) else layer for layer in found]
