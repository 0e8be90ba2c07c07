"""NVTX ranges of a turn: their order and nesting, and what a profiler is given."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from producer import Client
from tests.support import models as onnx_models
from tests.support.fake_cuda import FakeDriver, FakeModule
from tests.support.processes import ROOT, start_worker, until
from workers import runtime as runtime_module
from workers.models import load_models
from workers.ranges import NO_RANGES, Ranges
from workers.runtime import Runtime
from workers.settings import WorkerSettings
from workers.tensorrt.engine import TensorRTEngine
from workers.tensorrt.flavor import Flavor
from workers.tensorrt.provide import Plan


class Range(NamedTuple):
    """One range, noted when it ended; `path` names it and those around it, from the outside."""

    path: str
    count: int | None
    thread: int


class FakeNvtx:
    """Notes ranges; one that ends out of order fails."""

    def __init__(self) -> None:
        self.ended: list[Range] = []
        self.kinds: set[tuple[str | None, str | int | None]] = set()
        self._open = threading.local()

    def annotate(
        self,
        message: str | None = None,
        color: str | int | None = None,
        domain: str | None = None,
        category: str | int | None = None,
        payload: Any = None,
    ) -> FakeAnnotation:
        self.kinds.add((domain, category))
        return FakeAnnotation(self, str(message), payload)

    @property
    def stack(self) -> list[str]:
        if not hasattr(self._open, "stack"):
            self._open.stack = []
        stack: list[str] = self._open.stack
        return stack


class FakeAnnotation:
    """An open range."""

    def __init__(self, nvtx: FakeNvtx, name: str, count: int | None) -> None:
        self._nvtx, self._name, self._count = nvtx, name, count

    def __enter__(self) -> FakeAnnotation:
        self._nvtx.stack.append(self._name)
        return self

    def __exit__(self, *_: object) -> None:
        path = "/".join(self._nvtx.stack)
        assert self._nvtx.stack.pop() == self._name
        self._nvtx.ended.append(Range(path, self._count, threading.get_ident()))


def test_the_real_package_takes_our_call() -> None:
    real = pytest.importorskip("nvtx", reason="needs trtq[profiling]")
    ours = inspect.signature(FakeNvtx().annotate).parameters
    assert list(inspect.signature(real.annotate).parameters) == list(ours)
    with Ranges("m", real).open("run", 3), Ranges("m", real).open("h2d"):
        pass


def test_without_a_profiler_asked_for_there_is_one_range_that_is_none() -> None:
    assert NO_RANGES.open("run", 1) is NO_RANGES.open("reply")
    with NO_RANGES.open("run"), NO_RANGES.open("run"):
        pass


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    made = FakeNvtx()
    monkeypatch.setattr(runtime_module, "import_nvtx", lambda: made)
    return made


@pytest.fixture
def runtime(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvtx: FakeNvtx
) -> Iterator[Runtime]:
    """A model that doubles rows of four numbers, by the TensorRT engine over a fake device."""
    onnx_models.write_config(tmp_path, "doubles", max_batch=16, max_delay_ms=0)

    def make_engine(config: object, *, ranges: Ranges, **_: object) -> TensorRTEngine:
        driver = FakeDriver()
        return TensorRTEngine(
            lambda: Plan(b"plan", Path("m.engine"), "key", from_cache=True),
            max_batch=16,
            slots=1,
            pinned_limit_bytes=1 << 20,
            driver=driver,
            flavor=Flavor("tensorrt", FakeModule(driver), "10.0"),
            ranges=ranges,
        )

    monkeypatch.setattr(runtime_module, "make_engine", make_engine)
    settings = WorkerSettings(
        redis_url=redis_url, models=str(tmp_path), linger_ms=200, nvtx=True, heartbeat_s=10
    )
    made = Runtime(settings, "t", load_models([tmp_path]), lambda reason: None, lambda: False)
    made.start()
    yield made
    made.close()


def test_order_and_nesting_of_a_turn(redis_url: str, runtime: Runtime, nvtx: FakeNvtx) -> None:
    warmed = len(nvtx.ended)
    assert {found.path for found in nvtx.ended} == {"h2d", "execute", "d2h"}
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    with Client(redis_url) as client:
        ticket = client.submit("doubles", rows)
        until(lambda: runtime.models[0].inbox.look().rows)
        runtime.turn("doubles", "test")
        np.testing.assert_array_equal(ticket.result(timeout=20), rows * 2)
    found = nvtx.ended[warmed:]
    assert found[0].path == "claim"
    assert [(one.path, one.count) for one in found if one.path not in ("claim", "wait")] == [
        ("gather", 1),
        ("run/h2d", 3),
        ("run/execute", 3),
        ("run/d2h", 3),
        ("run", 3),
        ("scatter", 3),
        ("reply", 1),
    ]
    # Nothing more comes: the turn waits for its linger.
    assert found[-1].path == "wait"
    by_stage = {one.path: one.thread for one in found}
    assert by_stage["claim"] == by_stage["wait"] == threading.get_ident()
    assert by_stage["gather"] == by_stage["run/execute"] == by_stage["scatter"]
    assert by_stage["gather"] != by_stage["claim"]
    assert nvtx.kinds == {("trtq", "doubles")}


def test_a_failed_batch_ends_its_ranges(redis_url: str, runtime: Runtime, nvtx: FakeNvtx) -> None:
    warmed = len(nvtx.ended)
    with Client(redis_url) as client:
        engine = runtime.models[0].engine
        assert isinstance(engine, TensorRTEngine)
        for context in engine._plan.engine.contexts:
            context.refuses = True
        ticket = client.submit("doubles", np.ones(4, np.float32))
        until(lambda: runtime.models[0].inbox.look().rows)
        runtime.turn("doubles", "test")
        assert "could not run" in str(ticket.exception(timeout=20))
    paths = [one.path for one in nvtx.ended[warmed:]]
    assert paths[paths.index("gather") :][:4] == ["gather", "run/h2d", "run/execute", "run"]
    assert "reply" in paths
    assert "scatter" not in paths


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    onnx_models.checksum_model(folder / "checksum.onnx", 16)
    onnx_models.write_config(folder, "checksum", max_batch=64)
    return folder


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_a_profiler_is_given_by_a_real_worker(
    redis_url: str, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nvtx", reason="needs trtq[profiling]")
    tool, log = tmp_path / "nvtx_tool.so", tmp_path / "ranges"
    source = ROOT / "tests" / "support" / "nvtx_tool.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tool, source], check=True, timeout=60)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(tool))
    monkeypatch.setenv("NVTX_TOOL_LOG", str(log))
    worker = start_worker(redis_url, models, nvtx="1")
    try:
        with Client(redis_url) as client:
            client.submit("checksum", np.ones((5, 16), np.uint8)).result(timeout=20)
    finally:
        assert worker.stop() == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    (category,) = [line[2] for line in lines if line[:2] == ["category", "trtq"]]
    pushed = [line[3:] for line in lines if line[0] == "push" and line[2] == "trtq"]
    assert ["category", "trtq", category, "checksum"] in lines
    assert {stage for stage, *_ in pushed} == {
        *("claim", "wait", "gather", "run", "scatter", "reply")
    }
    for stage, count in (("gather", "1"), ("run", "5"), ("scatter", "5"), ("reply", "1")):
        assert [stage, category, count] in pushed
    assert len(pushed) == sum(line[0] == "pop" and line[2] == "trtq" for line in lines)


def test_a_worker_without_the_package_says_so_at_start(
    redis_url: str, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvtx.py").write_text("raise ImportError('no nvtx here')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    worker = start_worker(redis_url, models, nvtx="1", wait=False)
    assert worker.process.wait(60) == 78
    assert "TRTQ_NVTX needs the package nvtx (no nvtx here): pip install" in worker.text
    worker = start_worker(redis_url, models)
    assert worker.stop() == 0
