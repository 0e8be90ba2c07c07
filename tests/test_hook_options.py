"""Hooks in configurations: which are imported, and which are refused with which words."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from producer.errors import ConfigError
from producer.spec import TensorSpec
from workers.engines import make_engine
from workers.engines.hooks import HookedEngine
from workers.models import ModelConfig, load_models
from workers.settings import WorkerSettings

X = {"name": "x", "dtype": "int64", "shape": []}


def config(function: str, key: str = "postprocess", **keys: Any) -> ModelConfig:
    tensors = "outputs" if key == "postprocess" else "inputs"
    return ModelConfig.model_validate(
        {"name": "m", "path": Path("/m"), key: {"function": function, tensors: [X]}, **keys}
    )


@pytest.mark.parametrize(
    ("reference", "allowed", "words"),
    [
        ("tests.support.hooks:same_outputs", "", "from no module only.*TRTQ_HOOK_MODULES"),
        ("tests.support.hooks:same_outputs", "tests.supp", "from 'tests.supp' only; .* add tests"),
        ("tests.support.hooks:same_outputs", "support,hooks", "from 'support', 'hooks' only"),
        ("no_such_module:f", "no_such_module", "No module named.*PYTHONPATH"),
        ("tests.support.hooks:nothing", "tests", "the module has no such function"),
        ("tests.support.hooks:NUMBER", "tests", "is a int, not a function"),
        ("tests.support.hooks:copy_inputs", "tests", r"called with \(outputs\): missing"),
        ("tests.support.hooks:later", "tests", "plain function: not async"),
    ],
)
def test_a_hook_that_cannot_be_had_is_refused(reference: str, allowed: str, words: str) -> None:
    settings = WorkerSettings(hook_modules=allowed)
    with pytest.raises(ConfigError, match=words) as failure:
        make_engine(config(reference), hook_modules=settings.allowed_hook_modules)
    assert f"model 'm': postprocess '{reference}'" in failure.value.message


def test_preprocess_takes_two_arguments() -> None:
    with pytest.raises(ConfigError, match=r"preprocess .* called with \(inputs, into\): too many"):
        make_engine(
            config("tests.support.hooks:same_outputs", "preprocess"), hook_modules=["tests"]
        )
    make_engine(config("tests.support.hooks:copy_inputs", "preprocess"), hook_modules=["tests"])


def test_a_function_without_a_signature_is_taken() -> None:
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(dict)
    make_engine(config("builtins:dict"), hook_modules=["builtins"])


def test_a_module_that_is_not_allowed_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unwanted_hooks.py").write_text("raise RuntimeError('it ran')\n")
    with pytest.raises(ConfigError, match="from 'tests' only"):
        make_engine(config("unwanted_hooks:f"), hook_modules=["tests"])
    with pytest.raises(ConfigError, match=r"cannot be imported \(RuntimeError: it ran\)$"):
        make_engine(config("unwanted_hooks:f"), hook_modules=["tests", "unwanted_hooks"])


@pytest.mark.parametrize("names", ["tests", "tests.support", " a.b , tests.support.hooks ,"])
def test_a_module_and_all_inside_it_is_allowed(names: str) -> None:
    modules = WorkerSettings(hook_modules=names).allowed_hook_modules
    made = make_engine(config("tests.support.hooks:same_outputs"), hook_modules=modules)
    assert isinstance(made, HookedEngine)


@pytest.mark.parametrize("names", ["a b", "a;b", "a..b", "a,.b", "a/b", "3a"])
def test_settings_take_module_names_only(names: str) -> None:
    with pytest.raises(ValidationError, match="is no module name; separate names with commas"):
        WorkerSettings(hook_modules=names)


def test_no_hooks_no_wrapper() -> None:
    plain = ModelConfig.model_validate({"name": "m", "path": Path("/m")})
    assert not isinstance(make_engine(plain, hook_modules=["tests"]), HookedEngine)


ONE = "{name: x, dtype: bool, shape: []}"
HEAD = "path: m.onnx\npreprocess:\n  function: a.b:c\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path: m.onnx\npreprocess: a.b:c", "preprocess is 'a.b:c'"),
        ("path: m.onnx\npreprocess: {inputs: []}", "preprocess.function"),
        (HEAD, "preprocess.inputs is"),
        (HEAD + "  inputs: []", "preprocess.inputs is []: name 1 to 256 tensors"),
        (HEAD + "  outputs: []", "preprocess.outputs is []: Extra"),
        (HEAD + "  inputs: [{name: x, dtype: float, shape: []}]", "dtype is 'float': use one of"),
        (HEAD + "  inputs: [{name: '', dtype: bool, shape: []}]", "inputs.0.name is ''"),
        (HEAD + "  inputs: [{name: x, dtype: bool}]", "preprocess.inputs.0.shape"),
        (HEAD + "  inputs: [{name: x, dtype: bool, shape: [0]}]", "inputs.0.shape.0 is 0"),
        (HEAD + "  inputs: [{name: x, dtype: bool, shape: [2147483648]}]", "less than or equal"),
        (HEAD + "  inputs: [{name: x, dtype: bool, shape: [8.0]}]", "inputs.0.shape.0 is 8.0"),
        (HEAD + "  inputs: [{name: x, dtype: bool, shape: [true]}]", "inputs.0.shape.0 is True"),
        (HEAD + "  inputs: [{name: x, dtype: bool, shape: 8}]", "inputs.0.shape is 8"),
        (
            HEAD
            + "  inputs: [{name: x, dtype: bool, shape: []}, {name: x, dtype: bool, shape: []}]",
            "'x' is named twice",
        ),
        (HEAD.replace("a.b:c", "a.b"), "function is 'a.b': name a function as module:function"),
        (HEAD.replace("a.b:c", "a.b:c.d"), "module:function"),
        (HEAD.replace("a.b:c", "../a:c"), "module:function"),
        (HEAD.replace("a.b:c", "':c'"), "module:function"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError) as failure:
        load_models([tmp_path])
    assert words in failure.value.message


def test_a_configuration_with_hooks(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(
        HEAD + "  inputs: [{name: x, dtype: uint8, shape: [null, 3]}]\npostprocess:\n"
    )
    (found,) = load_models([tmp_path])
    assert found.preprocess is not None
    assert found.preprocess.spec == (TensorSpec(name="x", dtype="uint8", shape=(None, 3)),)
    assert found.postprocess is None
