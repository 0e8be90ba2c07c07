"""The model under load: an exact checksum and an echo, so that every answer is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper

NAME = "checksum"
WIDTH = 64
BATCH = 16
_OPSET = 17
_IR_VERSION = 8
_WEIGHTS = np.arange(1, WIDTH + 1, dtype=np.int64)

#: What a poison task does to the engine (benchmarks/chaos/app.py), and its error's code.
POISONS = {
    "raise": "engine_failed",
    "shape": "engine_failed",
    "hang": "batch_timeout",
    "segfault": "poison_task",
}
_KIND = 10**9


def poison_id(kind: str, number: int) -> int:
    """The id of a task that does `kind` to the engine: negative."""
    return -(list(POISONS).index(kind) * _KIND + number + 1)


def poison_kind(task_id: int) -> str | None:
    """What a task with this id does to the engine; None for a good one."""
    return None if task_id >= 0 else list(POISONS)[(-task_id - 1) // _KIND]


def checksum(row: np.ndarray[Any, Any], task_id: int) -> int:
    """What the model's output `sum` is for one row and its id."""
    return int((row.astype(np.int64) * _WEIGHTS).sum()) + 7 * task_id


def write_model(folder: Path, **keys: Any) -> None:
    """The model and its configuration; `x` uint8 [n, 64], `id` int64 [n] to `sum` and `echo`."""
    folder.mkdir(parents=True, exist_ok=True)
    constants = {"weights": _WEIGHTS, "axes": np.array([1], np.int64), "seven": np.int64(7)}
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.INT64),
        helper.make_node("Mul", ["wide", "weights"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted", "axes"], ["bytes"], keepdims=0),
        helper.make_node("Mul", ["id", "seven"], ["marked"]),
        helper.make_node("Add", ["bytes", "marked"], ["sum"]),
        helper.make_node("Identity", ["id"], ["echo"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        NAME,
        [value("x", TensorProto.UINT8, ["n", WIDTH]), value("id", TensorProto.INT64, ["n"])],
        [value(name, TensorProto.INT64, ["n"]) for name in ("sum", "echo")],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION
    )
    onnx.checker.check_model(made)
    onnx.save(made, str(folder / f"{NAME}.onnx"))
    config = {"path": f"{NAME}.onnx", "max_batch": BATCH, "threads": 1, **keys}
    (folder / f"{NAME}.yaml").write_text(yaml.safe_dump(config))
