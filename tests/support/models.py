"""Small ONNX models for tests, and configurations that serve them.

Every function writes one file. The opset and IR version are old enough for any ONNX Runtime that
trtq accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8


def checksum_model(path: Path, width: int) -> None:
    """`x` uint8 [N, width] to `sum` int64 [N]: the sum of x[i] * (i + 1), exact."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Mul", ["wide", "weights"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "axes"], ["sum"], keepdims=0),
    ]
    constants = {
        "weights": np.arange(1, width + 1, dtype=np.int64),
        "axes": np.array([1], np.int64),
    }
    _save(
        path,
        nodes,
        [_tensor("x", TensorProto.UINT8, ["N", width])],
        [_tensor("sum", TensorProto.INT64, ["N"])],
        constants,
    )


def checksum(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What checksum_model gives for uint8 rows of shape [N, width]: int64 [N]."""
    weights = np.arange(1, rows.shape[1] + 1, dtype=np.int64)
    return np.asarray((rows.astype(np.int64) * weights).sum(axis=1))


def identity_model(path: Path, width: int, dtype: str = "float32", batch: int | str = "N") -> None:
    """`x` of `dtype` [batch, width] to the same as `y`; `batch` may be a fixed number."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    _save(
        path,
        [helper.make_node("Identity", ["x"], ["y"])],
        [_tensor("x", kind, [batch, width])],
        [_tensor("y", kind, [batch, width])],
    )


def slow_model(path: Path, width: int = 256, work: int = 30) -> None:
    """`x` float32 [N, width] to `y` of the same shape through `work` matrix products.

    The defaults take some milliseconds a batch of 64 on one thread.
    """
    weights = np.random.default_rng(0).normal(0, width**-0.5, (width, width)).astype(np.float32)
    nodes = []
    name = "x"
    for step in range(work):
        after = "y" if step == work - 1 else f"tanh{step}"
        nodes += [
            helper.make_node("MatMul", [name, "weights"], [f"product{step}"]),
            helper.make_node("Tanh", [f"product{step}"], [after]),
        ]
        name = after
    _save(
        path,
        nodes,
        [_tensor("x", TensorProto.FLOAT, ["N", width])],
        [_tensor("y", TensorProto.FLOAT, ["N", width])],
        {"weights": weights},
    )


def two_inputs_model(path: Path, width: int) -> None:
    """`a` and `b`, float32 [N, width], to their `sum` and `product`."""
    _save(
        path,
        [
            helper.make_node("Add", ["a", "b"], ["sum"]),
            helper.make_node("Mul", ["a", "b"], ["product"]),
        ],
        [_tensor(name, TensorProto.FLOAT, ["N", width]) for name in ("a", "b")],
        [_tensor(name, TensorProto.FLOAT, ["N", width]) for name in ("sum", "product")],
    )


def dynamic_model(path: Path) -> None:
    """`x` float32 [N, L], both dynamic, to `square` of the same shape."""
    _save(
        path,
        [helper.make_node("Mul", ["x", "x"], ["square"])],
        [_tensor("x", TensorProto.FLOAT, ["N", "L"])],
        [_tensor("square", TensorProto.FLOAT, ["N", "L"])],
    )


def row_failing_model(path: Path, size: int = 10) -> None:
    """`index` int64 [N] to `value` float32 [N]: index / 2. Outside -size..size-1 a batch fails."""
    _save(
        path,
        [helper.make_node("Gather", ["table", "index"], ["value"])],
        [_tensor("index", TensorProto.INT64, ["N"])],
        [_tensor("value", TensorProto.FLOAT, ["N"])],
        {"table": np.arange(size, dtype=np.float32) / 2},
    )


def used_columns_model(path: Path, width: int) -> None:
    """`x` float32 [N, width] to `y` float32 [N, K]: the K columns where some row is above 0."""
    _save(
        path,
        [
            helper.make_node("ReduceMax", ["x"], ["largest"], axes=[0], keepdims=0),
            helper.make_node("Greater", ["largest", "zero"], ["used"]),
            helper.make_node("NonZero", ["used"], ["places"]),
            helper.make_node("Squeeze", ["places", "first"], ["columns"]),
            helper.make_node("Gather", ["x", "columns"], ["y"], axis=1),
        ],
        [_tensor("x", TensorProto.FLOAT, ["N", width])],
        [_tensor("y", TensorProto.FLOAT, ["N", "K"])],
        {"zero": np.zeros((), np.float32), "first": np.array([0], np.int64)},
    )


def first_column_model(path: Path, width: int) -> None:
    """`x` float32 [N, width] to `y` float32 [N, 1], its first column: reads a row, uses little."""
    _save(
        path,
        [helper.make_node("Gather", ["x", "first"], ["y"], axis=1)],
        [_tensor("x", TensorProto.FLOAT, ["N", width])],
        [_tensor("y", TensorProto.FLOAT, ["N", 1])],
        {"first": np.array([0], np.int64)},
    )


def scalar_model(path: Path) -> None:
    """`x`, a float32 without any axis, to `y`: no model that can be batched."""
    _save(
        path,
        [helper.make_node("Neg", ["x"], ["y"])],
        [_tensor("x", TensorProto.FLOAT, [])],
        [_tensor("y", TensorProto.FLOAT, [])],
    )


def text_model(path: Path) -> None:
    """`x` string [N] to `y`: a dtype that cannot travel."""
    _save(
        path,
        [helper.make_node("Identity", ["x"], ["y"])],
        [_tensor("x", TensorProto.STRING, ["N"])],
        [_tensor("y", TensorProto.STRING, ["N"])],
    )


def write_config(folder: Path, name: str, **keys: Any) -> Path:
    """Writes `<name>.yaml` with `path: <name>.onnx` and `keys`, which may override it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"path": f"{name}.onnx", **keys}), encoding="utf-8")
    return file


def _tensor(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _save(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray[Any, Any]] | None = None,
) -> None:
    graph = helper.make_graph(
        nodes,
        "model",
        inputs,
        outputs,
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
