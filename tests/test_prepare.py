"""Preparation and half precision in the ONNX model, held against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from producer.errors import EngineBuildFailed
from tests.support import models
from workers.tensorrt.cache import PlanCache
from workers.tensorrt.options import BuildOptions, Preparation
from workers.tensorrt.precision import to_half
from workers.tensorrt.prepare import prepare_model
from workers.tensorrt.provide import provide_plan

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def image_model() -> Any:
    """`x` float32 [N, 3, 4, 5] through a convolution to `y`."""
    weights = np.random.default_rng(0).normal(size=(2, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 4, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2, 2, 3])],
        [numpy_helper.from_array(weights, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", models.OPSET)])
    made.ir_version = models.IR_VERSION
    return made


def run(model: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("half", [False, True])
def test_same_numbers_as_preparation_outside(layout: Literal["nhwc", "nchw"], half: bool) -> None:
    raw = np.random.default_rng(1).integers(0, 256, (2, 3, 4, 5), dtype=np.uint8)
    mean, std = (np.array(v, np.float32).reshape(1, 3, 1, 1) for v in (MEAN, STD))
    wanted = run(image_model(), (raw * np.float32(1 / 255) - mean) / std)
    how = Preparation(layout=layout, scale=1 / 255, mean=MEAN, std=STD)
    model = to_half(image_model()) if half else image_model()
    given = raw.transpose(0, 2, 3, 1) if layout == "nhwc" else raw
    found = run(prepare_model(model, {"x": how}), np.ascontiguousarray(given))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=0.1 if half else 1e-4)


def test_half_precision_is_used() -> None:
    kinds = {weights.data_type for weights in to_half(image_model()).graph.initializer}
    assert kinds == {TensorProto.FLOAT16}


def test_what_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineBuildFailed, match="'z', but the model's inputs are 'x'"):
        prepare_model(image_model(), {"z": Preparation()})
    with pytest.raises(EngineBuildFailed, match="mean has 2 values, but the input has 3"):
        prepare_model(image_model(), {"x": Preparation(mean=(1.0, 2.0))})
    models.identity_model(tmp_path / "flat.onnx", 3)
    with pytest.raises(EngineBuildFailed, match="channels, height, width"):
        prepare_model(onnx.load(tmp_path / "flat.onnx"), {"x": Preparation()})


def test_a_prepared_half_model_is_built(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    onnx.save(image_model(), tmp_path / "m.onnx")
    options = BuildOptions(fp16=True, prepare={"x": Preparation(mean=MEAN, std=STD)})
    plan = provide_plan(tmp_path / "m.onnx", 2, options, None, PlanCache(tmp_path / "c", 1 << 30))
    assert len(plan.data) > 1000
