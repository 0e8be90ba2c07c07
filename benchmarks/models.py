"""The ONNX models of the benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_OPSET = 17
_IR_VERSION = 8


def write_echo(path: Path, size: int) -> None:
    """A model that returns its input, `size` bytes a row."""
    value = [
        helper.make_tensor_value_info(name, TensorProto.UINT8, ["n", size]) for name in ("x", "y")
    ]
    node = helper.make_node("Identity", ["x"], ["y"])
    _write(path, helper.make_graph([node], "echo", value[:1], value[1:]))


def write_layers(path: Path, *, inputs: int, hidden: int, layers: int, outputs: int) -> None:
    """Dense layers with ReLU: `inputs` float32 a row in, `layers` of `hidden`, `outputs` out."""
    random = np.random.default_rng(7)
    sizes = [inputs, *[hidden] * layers, outputs]
    nodes, weights, value = [], [], "x"
    for i in range(len(sizes) - 1):
        scale = np.sqrt(2 / sizes[i])
        weight = random.standard_normal((sizes[i], sizes[i + 1]), np.float32) * np.float32(scale)
        weights.append(numpy_helper.from_array(weight, f"w{i}"))
        last = i == len(sizes) - 2
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], ["y" if last else f"m{i}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"]))
        value = f"r{i}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", inputs])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", outputs])
    _write(path, helper.make_graph(nodes, "layers", [x], [y], weights))


def _write(path: Path, graph: onnx.GraphProto) -> None:
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
