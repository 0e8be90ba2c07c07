"""The engine contract, and models that need more than fixed shapes, over TensorRT on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.errors import EngineBuildFailed
from tests.engine_contract import EngineContract, Subject
from tests.support import models as onnx_models

cuda = pytest.importorskip("pycuda.driver", reason="PyCUDA is not installed")
try:
    cuda.init()
except cuda.Error as failure:
    pytest.skip(f"no usable GPU: {failure}", allow_module_level=True)

from workers.tensorrt import engine as engine_module  # noqa: E402
from workers.tensorrt.cache import PlanCache  # noqa: E402
from workers.tensorrt.context import PlanContext  # noqa: E402
from workers.tensorrt.device import current_device  # noqa: E402
from workers.tensorrt.engine import TensorRTEngine  # noqa: E402
from workers.tensorrt.flavor import Flavor, find_flavor  # noqa: E402
from workers.tensorrt.graphs import StreamCapture  # noqa: E402
from workers.tensorrt.options import BuildOptions, Profile  # noqa: E402
from workers.tensorrt.provide import provide_plan  # noqa: E402

CAPACITY = 48
PROFILES = (Profile(opt_batch=8, max_batch=8), Profile(opt_batch=CAPACITY, max_batch=CAPACITY))


def make(
    folder: Path, path: Path, *, graphs: bool = True, flavor: Flavor | None = None
) -> TensorRTEngine:
    cache = PlanCache(folder / "cache", 1 << 30)

    def read_plan() -> Any:
        options = BuildOptions(profiles=PROFILES)
        return provide_plan(path, CAPACITY, options, current_device(), cache)

    return TensorRTEngine(
        read_plan,
        max_batch=CAPACITY,
        slots=3,
        pinned_limit_bytes=1 << 30,
        graphs=graphs,
        cache=cache,
        flavor=flavor,
    )


def identity_subject(folder: Path) -> Subject:
    path = folder / "identity.onnx"
    onnx_models.identity_model(path, 4)
    return Subject(make(folder, path), "x", "float32", (4,), lambda x: {"y": x})


def without_graphs_subject(folder: Path) -> Subject:
    path = folder / "identity.onnx"
    onnx_models.identity_model(path, 4)
    return Subject(make(folder, path, graphs=False), "x", "float32", (4,), lambda x: {"y": x})


def checksum_subject(folder: Path) -> Subject:
    path = folder / "checksum.onnx"
    onnx_models.checksum_model(path, 9)
    engine = make(folder, path)
    return Subject(engine, "x", "uint8", (9,), lambda x: {"sum": onnx_models.checksum(x)})


SUBJECTS = [identity_subject, without_graphs_subject, checksum_subject]


class TestContract(EngineContract):
    @pytest.fixture(params=SUBJECTS, ids=lambda make: make.__name__.removesuffix("_subject"))
    def subject(self, request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
        build: Callable[[Path], Subject] = request.param
        return build(tmp_path)


def used_columns(rows: np.ndarray) -> np.ndarray:
    return rows[:, (rows > 0).any(axis=0)]


def test_an_output_whose_shape_depends_on_the_data(tmp_path: Path) -> None:
    path = tmp_path / "columns.onnx"
    onnx_models.used_columns_model(path, 8)
    engine = make(tmp_path, path)
    try:
        engine.load()
    except EngineBuildFailed as failure:
        engine.close()
        if not find_flavor().is_rtx:
            raise
        pytest.skip(f"TensorRT for RTX has no NonZero: {failure}")
    slot = engine.make_slot()
    slot.activate()
    random = np.random.default_rng(0)
    try:
        for count, columns in ((4, 3), (4, 8), (1, 1), (9, 5), (4, 0), (47, 8), (4, 3)):
            rows = np.zeros((count, 8), np.float32)
            rows[:, random.permutation(8)[:columns]] = random.random((count, columns)) + 0.5
            slot.input_buffer("x", count, (8,))[...] = rows
            (found,) = engine.run(slot, count).values()
            assert found.shape == (count, columns)
            np.testing.assert_array_equal(found, used_columns(rows))
    finally:
        slot.close()
        engine.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_an_output_that_gets_its_memory_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    known = PlanContext.set_shapes

    def unknown(self: PlanContext, shapes: dict[str, Any]) -> dict[str, Any]:
        return {name: (-1, *shape[1:]) for name, shape in known(self, shapes).items()}

    # As if the first axis depended on the data: then the allocator gives memory and tells it.
    monkeypatch.setattr(PlanContext, "set_shapes", unknown)
    path = tmp_path / "m.onnx"
    onnx_models.checksum_model(path, 9)
    engine = make(tmp_path, path, graphs=graphs)
    engine.load()
    slot = engine.make_slot()
    slot.activate()
    random = np.random.default_rng(0)
    try:
        for count in (1, 40, 3, 48, 48, 2):
            rows = random.integers(0, 256, (count, 9), dtype=np.uint8)
            slot.input_buffer("x", count, (9,))[...] = rows
            (sums,) = engine.run(slot, count).values()
            np.testing.assert_array_equal(sums, onnx_models.checksum(rows))
            sums[...] = -1
    finally:
        slot.close()
        engine.close()


class Recorder(StreamCapture):
    """Counts what is captured and launched."""

    recorded = 0
    launched = 0

    def record(self, stream: int, enqueue: Callable[[], Any]) -> Any | None:
        graph = super().record(stream, enqueue)
        self.recorded += graph is not None
        return graph

    def launch(self, graph: Any, stream: int) -> None:
        super().launch(graph, stream)
        self.launched += 1


def test_stream_capture_gives_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    recorder = Recorder(runtime)
    monkeypatch.setattr(engine_module, "find_capture", lambda: recorder)
    found = find_flavor()
    path = tmp_path / "m.onnx"
    onnx_models.checksum_model(path, 9)
    # TensorRT for RTX captures by itself; taken for the other flavours it leaves that to us.
    engine = make(tmp_path, path, flavor=Flavor("tensorrt", found.module, found.version))
    engine.load()
    slot = engine.make_slot()
    slot.activate()
    random = np.random.default_rng(0)
    try:
        for count in (5, 5, 5, 40, 5, 40, 40, 5, 1, 1, 1):
            rows = random.integers(0, 256, (count, 9), dtype=np.uint8)
            slot.input_buffer("x", count, (9,))[...] = rows
            (sums,) = engine.run(slot, count).values()
            np.testing.assert_array_equal(sums, onnx_models.checksum(rows))
            sums[...] = -1
        assert recorder.recorded == 3
        assert recorder.launched == 5
    finally:
        slot.close()
        engine.close()
