"""Puts input preparation into an ONNX model, so that callers send raw uint8 images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from producer.errors import EngineBuildFailed
from workers.tensorrt.options import Preparation
from workers.tensorrt.source import import_onnx

_IMAGE_RANK = 4


def prepare_model(model: Any, preparations: Mapping[str, Preparation]) -> Any:
    """Changes an onnx.ModelProto in place and returns it.

    A prepared input keeps its name and becomes uint8, (batch, height, width, channels) or
    (batch, channels, height, width); the graph begins with cast, (value * scale - mean) / std in
    float32, and the transposition to channels first that the model had. Raises EngineBuildFailed
    for an input that is absent, is no float image, or has another number of channels.
    """
    inputs = {value.name: value for value in model.graph.input}
    for name, preparation in preparations.items():
        if name not in inputs:
            raise EngineBuildFailed(
                f"build.prepare names input {name!r}, but the model's inputs are "
                f"{', '.join(map(repr, inputs))}"
            )
        _prepare(model, inputs[name], preparation)
    return model


def _prepare(model: Any, value: Any, preparation: Preparation) -> None:
    onnx = import_onnx()
    name, tensor = value.name, value.type.tensor_type
    kind = tensor.elem_type
    if len(tensor.shape.dim) != _IMAGE_RANK or kind not in (
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.FLOAT16,
    ):
        raise EngineBuildFailed(
            f"build.prepare.{name}: the input must be float32 or float16 and have the axes batch, "
            "channels, height, width"
        )
    channels = tensor.shape.dim[1].dim_value
    steps = [
        ("Mul", "scale", (preparation.scale,)),
        ("Sub", "mean", preparation.mean),
        ("Div", "std", preparation.std),
    ]
    make = onnx.helper.make_node
    nodes = [make("Cast", [name], [f"{name}/cast"], to=onnx.TensorProto.FLOAT)]
    if preparation.layout == "nhwc":
        nodes.append(make("Transpose", [f"{name}/cast"], [f"{name}/nchw"], perm=[0, 3, 1, 2]))
        dims = [type(dim)() for dim in tensor.shape.dim]
        for dim, origin in zip(dims, (0, 2, 3, 1), strict=True):
            dim.CopyFrom(tensor.shape.dim[origin])
        del tensor.shape.dim[:]
        tensor.shape.dim.extend(dims)
    for operator, what, numbers in steps:
        if len(numbers) not in (1, channels):
            raise EngineBuildFailed(
                f"build.prepare.{name}.{what} has {len(numbers)} values, but the input has "
                f"{channels or 'an unknown number of'} channels: give one for each, or one"
            )
        constant = np.array(numbers, np.float32).reshape(1, -1, 1, 1)
        model.graph.initializer.append(onnx.numpy_helper.from_array(constant, f"{name}/{what}"))
        before = nodes[-1].output[0]
        nodes.append(make(operator, [before, f"{name}/{what}"], [f"{name}/{operator}"]))
    if kind != onnx.TensorProto.FLOAT:
        nodes.append(make("Cast", [nodes[-1].output[0]], [f"{name}/ready"], to=kind))
    _rename(model.graph, name, nodes[-1].output[0])
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])
    tensor.elem_type = onnx.TensorProto.UINT8


def _rename(graph: Any, old: str, new: str) -> None:
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner, old, new)
