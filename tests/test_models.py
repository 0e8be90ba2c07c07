"""Model configurations: what is read, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from producer.errors import ConfigError, ModelConflict
from producer.spec import TensorSpec
from workers.engines.base import EngineSpec
from workers.models import ModelConfig, load_models

SPEC = EngineSpec((TensorSpec(name="x", dtype="float32", shape=(3, None)),), ())


def write(folder: Path, file: str, text: str) -> Path:
    path = folder / file
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults(tmp_path: Path) -> None:
    write(tmp_path, "resnet.yaml", "path: sub/resnet.onnx\n")
    (config,) = load_models([tmp_path])
    assert config.name == "resnet"
    assert config.engine == "onnxruntime"
    assert config.path == tmp_path.resolve() / "sub" / "resnet.onnx"
    assert (config.max_batch, config.slots, config.threads) == (64, 1, 0)


def test_all_keys(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.yaml",
        "name: big\nengine: tensorrt\npath: /models/a.plan\nmax_batch: 32\nmax_delay_ms: 0\n"
        "max_rows_per_task: 8\nforbid_nan: true\nqueue_max_rows: 1000\n"
        "queue_max_bytes: 2000000\nmax_task_bytes: 1000000\nthreads: 2\n",
    )
    (config,) = load_models([tmp_path])
    assert config.path == Path("/models/a.plan")
    assert config.max_delay_ms == 0
    assert config.slots == 4
    spec = config.model_spec(SPEC, 32)
    assert spec.name == "big"
    assert spec.inputs == SPEC.inputs
    assert (spec.max_batch, spec.max_rows_per_task, spec.cover_rows) == (32, 8, 32 * 6)
    assert (spec.queue_max_rows, spec.queue_max_bytes, spec.max_task_bytes) == (
        1000,
        2_000_000,
        1_000_000,
    )
    assert spec.forbid_nan


def test_several_folders_in_order_of_their_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    write(one, "b.yaml", "path: m.onnx")
    write(one, "a.yaml", "path: m.onnx")
    write(one, "notes.txt", "not a model")
    write(two, "c.yaml", "path: m.onnx")
    assert [config.name for config in load_models([one, two, one])] == ["a", "b", "c"]


def test_unknown_key_names_file_key_and_nearest(tmp_path: Path) -> None:
    file = write(tmp_path, "m.yaml", "path: m.onnx\nmax_bach: 3\n")
    with pytest.raises(
        ConfigError, match=r"unknown key 'max_bach'; did you mean 'max_batch'\?"
    ) as e:
        load_models([tmp_path])
    assert str(file.resolve()) in e.value.message


def test_unknown_key_unlike_any_lists_the_known(tmp_path: Path) -> None:
    write(tmp_path, "m.yaml", "path: m.onnx\n42: 3\n")
    with pytest.raises(ConfigError, match="unknown key 42; known keys are name, engine, path"):
        load_models([tmp_path])


def test_two_models_of_one_name(tmp_path: Path) -> None:
    write(tmp_path, "a.yaml", "name: same\npath: m.onnx")
    write(tmp_path, "b.yaml", "name: same\npath: m.onnx")
    with pytest.raises(ModelConflict, match=r"'same', in .*a\.yaml and .*b\.yaml"):
        load_models([tmp_path])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("- path\n- m.onnx\n", "not list"),
        ("just words", "not str"),
        ("path: [", "no valid YAML"),
        ("max_batch: 3", "`path` must name the model file"),
        ("path: 3", "it is 3"),
        ("path: m.onnx\nmax_batch: 0", "max_batch is 0"),
        ("path: m.onnx\nmax_batch: true", "max_batch is True"),
        ("path: m.onnx\nmax_batch: many", "max_batch is 'many'"),
        ("path: m.onnx\nmax_delay_ms: -1", "max_delay_ms is -1"),
        ("path: m.onnx\nmax_delay_ms: .inf", "max_delay_ms is inf"),
        ("path: m.onnx\nslots: 17", "slots is 17"),
        ("path: m.onnx\nslots: 1\nslots: 2", "the key 'slots' is there 2 times"),
        ("path: m.onnx\nrate_limit: {rows_per_s: 1, rows_per_s: 2}", "'rows_per_s' is there 2"),
        ("path: m.onnx\nbatch_timeout_s: 1.0e-9", "use 0.1 or more, or 0"),
        ("path: m.onnx\nbatch_timeout_s: .inf", "batch_timeout_s is inf"),
        ("path: m.onnx\nengine: tensorflow", "'onnxruntime' or 'tensorrt'"),
        ("path: m.onnx\nname: a b", "model name 'a b'"),
        ("path: m.onnx\nmax_batch: 4\nmax_rows_per_task: 5", "never split"),
        ("path: m.onnx\nqueue_max_rows: 10", "queue_max_rows is 10"),
        ("path: m.onnx\nqueue_max_bytes: 10", "queue_max_bytes is 10"),
        ("path: m.onnx\nmax_batch: 99999999999999999999", "max_batch is 99999999999999999999"),
        ("path: m.onnx\nqueue_max_rows: " + "9" * 4000, "integer of 13288 bits"),
        ("path: m.onnx\nqueue_max_rows: " + "9" * 5000, "no valid YAML"),
        ("path: m.onnx\nmax_delay_ms: 1.0e+300", "max_delay_ms is 1e+300"),
        ("path: m.onnx\nmax_batch: 2021-99-99", "no valid YAML"),
        ("path: m.onnx\nmax_batch: 0b_", "no valid YAML"),
        ("path: " + "[" * 5000, "more than 20 brackets"),
        ("- " * 5000, "nested too deeply"),
        ("path: [&a 1, *a]", "aliases"),
        ("path: &a [*a]", "aliases"),
        ("a: &a {path: m.onnx}\n<<: [*a, *a]", "aliases"),
        ('path: "a\\0b"', "is no path"),
        ('path: "\\ud800"', "no "),
        ("path: m.onnx\n? [1, 2]\n: 3", "no valid YAML"),
        ("path: m.onnx\n" + "x" * 900 + ": 3", "and 700 more"),
        ("path: m.onnx\nname: " + "x" * 5000, "and 4800 more"),
        ("path: m.onnx\nbuild: {" + ", ".join(f"k{i}: 1" for i in range(99)) + "}", "and 89 more"),
        ("# " + "x" * 20_000, "more than 16384 bytes"),
    ],
)
def test_refused(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, "m.yaml", text)
    with pytest.raises(ConfigError) as e:
        load_models([tmp_path])
    assert words in e.value.message
    assert "m.yaml" in e.value.message
    assert len(e.value.message) < 5000


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_models([tmp_path])


def test_folder_missing_or_without_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        load_models([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="no model configuration"):
        load_models([tmp_path])


def config(**keys: object) -> ModelConfig:
    return ModelConfig.model_validate({"name": "m", "path": Path("/m.onnx"), **keys})


def test_more_tensors_than_can_travel() -> None:
    many = tuple(TensorSpec(name=f"x{i}", dtype="float32", shape=()) for i in range(257))
    with pytest.raises(ConfigError, match="257 inputs or outputs, at most 256"):
        config().model_spec(EngineSpec(many, ()), None)


def test_capacity_lowers_the_default_and_refuses_what_was_asked() -> None:
    assert config().model_spec(SPEC, None).max_batch == 64
    lowered = config().model_spec(SPEC, 1)
    assert (lowered.max_batch, lowered.max_rows_per_task, lowered.cover_rows) == (1, 1, 3)
    with pytest.raises(ConfigError, match=r"max_batch is 8, but /m\.onnx takes at most 4 rows"):
        config(max_batch=8).model_spec(SPEC, 4)
    with pytest.raises(ConfigError, match="max_rows_per_task is 2"):
        config(max_rows_per_task=2).model_spec(SPEC, 1)
