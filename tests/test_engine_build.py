"""Plans from real ONNX files with the real builder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from producer.errors import EngineBuildFailed, ModelFileError
from tests.support import models
from workers.tensorrt.builder import build_plan
from workers.tensorrt.cache import PlanCache
from workers.tensorrt.flavor import find_flavor
from workers.tensorrt.options import BuildOptions, Profile
from workers.tensorrt.profiles import ShapeRange, shape_ranges
from workers.tensorrt.provide import provide_plan
from workers.tensorrt.source import digest, read_source

TARGET = "SM89"


def test_ranges_of_batch_and_further_axes() -> None:
    profile = Profile(min_batch=1, opt_batch=4, max_batch=8, axes={"x": ((2, 3, 5),)})
    (found,) = shape_ranges({"x": (-1, 7, -1), "y": (-1, 2), "fixed": (1, 2)}, [profile])
    assert found == {
        "x": ShapeRange((1, 7, 2), (4, 7, 3), (8, 7, 5)),
        "y": ShapeRange((1, 2), (4, 2), (8, 2)),
    }


@pytest.mark.parametrize(
    ("axes", "message"),
    [({}, "input 'x' has shape"), ({"nope": ((1, 1, 1),)}, "'nope', but the model's inputs")],
)
def test_axes_that_do_not_fit_are_named(
    axes: dict[str, tuple[tuple[int, int, int], ...]], message: str
) -> None:
    with pytest.raises(EngineBuildFailed, match=message):
        shape_ranges({"x": (-1, -1)}, [Profile(opt_batch=1, max_batch=1, axes=axes)])


def test_a_model_is_built(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    models.checksum_model(tmp_path / "m.onnx", 8)
    options = BuildOptions(workspace_bytes=64 << 20, optimization_level=3)
    built = build_plan(
        find_flavor("tensorrt_rtx"),
        read_source(tmp_path / "m.onnx"),
        options.profiles_for(4),
        options,
        target=TARGET,
    )
    assert len(built.plan) > 1000
    assert built.timing_cache is None


def test_an_unknown_target_and_operator_are_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    flavor = find_flavor("tensorrt_rtx")
    models.identity_model(tmp_path / "good.onnx", 2)
    profiles = BuildOptions().profiles_for(1)
    with pytest.raises(EngineBuildFailed, match=r"no target 'SM1'.*SM89"):
        build_plan(
            flavor, read_source(tmp_path / "good.onnx"), profiles, BuildOptions(), target="SM1"
        )
    model = onnx.load(tmp_path / "good.onnx")
    model.graph.node[0].op_type = "Nonsense"
    model.graph.node[0].name = "first"
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(EngineBuildFailed, match=r"'first' \(Nonsense\).*Nonsense is not supported"):
        build_plan(flavor, read_source(tmp_path / "bad.onnx"), profiles, BuildOptions())


def test_the_second_time_the_plan_is_found(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    cache = PlanCache(tmp_path / "cache", 1 << 30)
    models.identity_model(tmp_path / "m.onnx", 4)
    first = provide_plan(tmp_path / "m.onnx", 4, BuildOptions(), None, cache)
    again = provide_plan(tmp_path / "m.onnx", 4, BuildOptions(), None, cache)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert again.data == first.data == first.path.read_bytes()
    other = provide_plan(tmp_path / "m.onnx", 8, BuildOptions(), None, cache)
    assert other.key != first.key
    finished = provide_plan(first.path, 4, BuildOptions(), None, cache)
    assert finished.data == first.data


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model at all")
    (tmp_path / "empty.plan").write_bytes(b"")
    for name in ("bad.onnx", "absent.onnx"):
        with pytest.raises(ModelFileError, match=name):
            read_source(tmp_path / name)
    cache = PlanCache(tmp_path / "cache", 1)
    with pytest.raises(ModelFileError, match="is empty"):
        provide_plan(tmp_path / "empty.plan", 1, BuildOptions(), None, cache)


def test_external_weights_count(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", models.OPSET)])
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    before = digest(read_source(path))
    (tmp_path / "w.bin").write_bytes(np.zeros((4, 4), np.float32).tobytes())
    assert digest(read_source(path)) != before
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ModelFileError, match=r"w\.bin"):
        read_source(path)
