"""The engine contract over the fake and the ONNX engine, and what is the ONNX engine's own."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.errors import EngineFailed, MissingExtra, ModelFileError
from producer.spec import TensorSpec
from tests.engine_contract import EngineContract, Subject
from tests.support import models
from tests.support.fake_engine import FakeEngine
from tests.support.hooks import copy_inputs, same_outputs
from workers.engines import make_engine
from workers.engines.base import Array
from workers.engines.hook_functions import Hook
from workers.engines.hooks import HookedEngine
from workers.engines.host_buffer import ALIGNMENT_BYTES, HostBuffer
from workers.engines.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeSlot
from workers.models import ModelConfig, load_models

POISON = 77


def fake_subject(path: Path) -> Subject:
    def function(inputs: dict[str, Array]) -> dict[str, Array]:
        if (inputs["x"] == POISON).any():
            raise EngineFailed("poison")
        return {"y": inputs["x"] * 2}

    engine = FakeEngine(
        function,
        (TensorSpec(name="x", dtype="float32", shape=(3,)),),
        (TensorSpec(name="y", dtype="float32", shape=(3,)),),
    )
    return Subject(engine, "x", "float32", (3,), lambda x: {"y": x * 2}, POISON)


def limited_fake_subject(path: Path) -> Subject:
    subject = fake_subject(path)
    assert isinstance(subject.engine, FakeEngine)
    subject.engine.limit = 16
    return subject


def checksum_subject(path: Path) -> Subject:
    models.checksum_model(path, 9)
    return Subject(
        OnnxRuntimeEngine(path, threads=1, max_batch=8),
        "x",
        "uint8",
        (9,),
        lambda x: {"sum": models.checksum(x)},
    )


def dynamic_subject(path: Path) -> Subject:
    models.dynamic_model(path)
    engine = OnnxRuntimeEngine(path, threads=1, max_batch=8)
    return Subject(engine, "x", "float32", (6,), lambda x: {"square": x * x})


def failing_subject(path: Path) -> Subject:
    models.row_failing_model(path)
    engine = OnnxRuntimeEngine(path, threads=1, max_batch=8)
    half = lambda x: {"value": (x / 2).astype(np.float32)}  # noqa: E731
    return Subject(engine, "index", "int64", (), half, POISON)


def one_row_subject(path: Path) -> Subject:
    models.identity_model(path, 4, batch=1)
    return Subject(OnnxRuntimeEngine(path, threads=1), "x", "float32", (4,), lambda x: {"y": x})


SUBJECTS = [
    fake_subject,
    limited_fake_subject,
    checksum_subject,
    dynamic_subject,
    failing_subject,
    one_row_subject,
]


class TestContract(EngineContract):
    @pytest.fixture(params=SUBJECTS, ids=lambda make: make.__name__.removesuffix("_subject"))
    def subject(self, request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
        made: Subject = request.param(tmp_path / "m.onnx")
        return made


def through_hooks(make: Callable[[Path], Subject], path: Path, hooks: str) -> Subject:
    """The same engine behind hooks that change nothing: `hooks` names which of the two."""
    subject = make(path)
    x = tuple(None if make is dynamic_subject else size for size in subject.row_shape)
    sent = TensorSpec(name=subject.x_name, dtype=subject.dtype, shape=x)
    got = [
        TensorSpec(name=name, dtype=array.dtype.name, shape=x[: array.ndim - 1])
        for name, array in subject.expected(
            np.zeros((1, *subject.row_shape), subject.dtype)
        ).items()
    ]
    subject.engine = HookedEngine(
        subject.engine,
        "m",
        Hook("preprocess", copy_inputs, (sent,)) if "preprocess" in hooks else None,
        Hook("postprocess", same_outputs, tuple(got)) if "postprocess" in hooks else None,
        max_batch=8,
    )
    return subject


class TestContractThroughHooks(EngineContract):
    @pytest.fixture(params=["preprocess and postprocess", "preprocess", "postprocess"])
    def hooks(self, request: pytest.FixtureRequest) -> str:
        named: str = request.param
        return named

    @pytest.fixture(params=SUBJECTS, ids=lambda make: make.__name__.removesuffix("_subject"))
    def subject(self, request: pytest.FixtureRequest, hooks: str, tmp_path: Path) -> Subject:
        return through_hooks(request.param, tmp_path / "m.onnx", hooks)


def loaded(path: Path, **keys: Any) -> OnnxRuntimeEngine:
    engine = OnnxRuntimeEngine(path, threads=1, **keys)
    engine.load()
    return engine


@pytest.mark.parametrize(
    "dtype",
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split(),
)
def test_every_dtype_that_travels(tmp_path: Path, dtype: str) -> None:
    models.identity_model(tmp_path / "m.onnx", 5, dtype)
    engine = loaded(tmp_path / "m.onnx")
    assert engine.spec.inputs[0] == TensorSpec(name="x", dtype=dtype, shape=(5,))
    slot = engine.make_slot()
    x = (np.arange(15).reshape(3, 5) % 2).astype(dtype)
    slot.input_buffer("x", 3, (5,))[...] = x
    y = engine.run(slot, 3)["y"]
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_inputs_are_read_and_outputs_written_in_place(tmp_path: Path) -> None:
    models.identity_model(tmp_path / "m.onnx", 5)
    engine = loaded(tmp_path / "m.onnx", max_batch=4)
    slot = engine.make_slot()
    buffer = slot.input_buffer("x", 4, (5,))
    assert buffer.ctypes.data % ALIGNMENT_BYTES == 0
    buffer[...] = 1
    first = engine.run(slot, 4)["y"]
    assert first.ctypes.data % ALIGNMENT_BYTES == 0
    np.testing.assert_array_equal(first, 1)
    buffer[...] = 2
    np.testing.assert_array_equal(first, 1)
    # The same binding: only reads and writes through the bound addresses can show the new values.
    second = engine.run(slot, 4)["y"]
    assert second.ctypes.data == first.ctypes.data
    np.testing.assert_array_equal(first, 2)
    bound = slot.bind(4)
    assert bound.get_outputs()[0].data_ptr() == first.ctypes.data


def test_two_inputs_keep_their_names(tmp_path: Path) -> None:
    models.two_inputs_model(tmp_path / "m.onnx", 3)
    engine = loaded(tmp_path / "m.onnx")
    slot = engine.make_slot()
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    slot.input_buffer("b", 2, (3,))[...] = 10
    with pytest.raises(EngineFailed, match="'a' was not given 2 rows"):
        engine.run(slot, 2)
    slot.input_buffer("a", 2, (3,))[...] = a
    outputs = engine.run(slot, 2)
    assert list(outputs) == ["sum", "product"]
    np.testing.assert_array_equal(outputs["sum"], a + 10)
    np.testing.assert_array_equal(outputs["product"], a * 10)


def test_dynamic_rows_of_changing_length(tmp_path: Path) -> None:
    models.dynamic_model(tmp_path / "m.onnx")
    engine = loaded(tmp_path / "m.onnx")
    assert engine.spec.inputs[0].shape == (None,)
    slot = engine.make_slot()
    for rows, length in [(2, 3), (2, 100), (5, 1), (1, 3)]:
        slot.input_buffer("x", rows, (length,))[...] = length
        square = engine.run(slot, rows)["square"]
        np.testing.assert_array_equal(square, np.full((rows, length), length**2, np.float32))


def test_slow_model_keeps_its_shape(tmp_path: Path) -> None:
    models.slow_model(tmp_path / "m.onnx", width=16, work=3)
    engine = loaded(tmp_path / "m.onnx")
    slot = engine.make_slot()
    slot.input_buffer("x", 2, (16,))[...] = 1
    y = engine.run(slot, 2)["y"]
    assert y.shape == (2, 16)
    assert (np.abs(y) < 1).all()


def test_fixed_batch_of_one_is_its_capacity(tmp_path: Path) -> None:
    models.identity_model(tmp_path / "m.onnx", 2, batch=1)
    assert loaded(tmp_path / "m.onnx").capacity == 1


def test_missing_model_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.onnx does not exist"):
        loaded(tmp_path / "none.onnx")
    with pytest.raises(ModelFileError, match="is no file"):
        loaded(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model at all", bytes(range(256)) * 40])
def test_garbage_model_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"m\.onnx"):
        loaded(tmp_path / "m.onnx")


def test_truncated_model_file(tmp_path: Path) -> None:
    models.slow_model(tmp_path / "m.onnx")
    whole = (tmp_path / "m.onnx").read_bytes()
    (tmp_path / "m.onnx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="cannot be loaded as an ONNX model"):
        loaded(tmp_path / "m.onnx")


def test_models_that_cannot_be_batched(tmp_path: Path) -> None:
    models.identity_model(tmp_path / "fixed.onnx", 2, batch=4)
    models.scalar_model(tmp_path / "scalar.onnx")
    models.text_model(tmp_path / "text.onnx")
    for name, words in [
        ("fixed", "fixed to 4: export it with a dynamic batch axis"),
        ("scalar", "has no batch axis"),
        ("text", "cannot travel"),
    ]:
        with pytest.raises(ModelFileError, match=words):
            loaded(tmp_path / f"{name}.onnx")


def test_no_memory_for_a_slot(tmp_path: Path) -> None:
    models.identity_model(tmp_path / "m.onnx", 1 << 20)
    with pytest.raises(EngineFailed, match="no memory for a slot"):
        loaded(tmp_path / "m.onnx", max_batch=1 << 40).make_slot()


def test_without_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name.split(".")[0] == "onnxruntime":
            raise ImportError("No module named 'onnxruntime'")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r"pip install 'trtq\[cpu\]'"):
        loaded(tmp_path / "m.onnx")


def config(**keys: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "path": Path("/m.onnx"), **keys})


def test_make_engine() -> None:
    engine = make_engine(config(threads=2))
    assert isinstance(engine, OnnxRuntimeEngine)


def test_make_engine_of_tensorrt_opens_no_device() -> None:
    from workers.tensorrt.engine import TensorRTEngine

    assert isinstance(make_engine(config(engine="tensorrt")), TensorRTEngine)


def test_making_an_engine_imports_no_runtime() -> None:
    code = (
        "import sys; from pathlib import Path; from workers.engines import make_engine;"
        "from workers.models import ModelConfig;"
        "make_engine(ModelConfig(name='m', path=Path('/m')));"
        "assert 'onnxruntime' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_host_buffer_grows_by_half_and_keeps_old_arrays() -> None:
    buffer = HostBuffer(np.dtype("int32"))
    old = buffer.array(100, (1,))
    old[...] = 5
    assert buffer.array(101, (1,)).shape == (101, 1)
    assert buffer.rows((1,)) == 150
    np.testing.assert_array_equal(old, 5)
    assert buffer.array(4, (0,)).shape == (4, 0)


def test_fake_engine_follows_its_script_and_records() -> None:
    spec = (TensorSpec(name="x", dtype="int64", shape=()),)
    failure = EngineFailed("planned")
    engine = FakeEngine(lambda inputs: inputs, spec, spec, script=[None, failure])
    engine.load()
    slot = engine.make_slot()
    slot.activate()
    slot.input_buffer("x", 2, ())[...] = [3, 4]
    engine.run(slot, 2)
    with pytest.raises(EngineFailed, match="planned"):
        engine.run(slot, 1)
    engine.run(slot, 1)
    assert [call.rows for call in engine.calls] == [2, 1, 1]
    assert engine.calls[0].inputs["x"].tolist() == [3, 4]


def test_digits_model_beside_its_configuration() -> None:
    folder = Path(models.__file__).parents[2] / "configs" / "models"
    (digits,) = [found for found in load_models([folder]) if found.name == "digits"]
    engine = make_engine(digits)
    engine.load()
    spec = digits.model_spec(engine.spec, engine.capacity)
    assert spec.inputs == (TensorSpec(name="image", dtype="float32", shape=(1, 8, 8)),)
    assert spec.outputs == (TensorSpec(name="logits", dtype="float32", shape=(10,)),)
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    half = len(data.images) // 2
    images, labels = data.images[half:], data.target[half:]
    slot = engine.make_slot()
    assert isinstance(slot, OnnxRuntimeSlot)
    slot.input_buffer("image", len(images), (1, 8, 8))[...] = images[:, None]
    found = engine.run(slot, len(images))["logits"].argmax(axis=1)
    assert (found == labels).mean() >= 0.97
