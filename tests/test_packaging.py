"""What is shipped: imports, wheel, and documentation that is complete."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from producer.config import ProducerSettings
from producer.scripts import script
from tests.support.processes import ROOT
from workers.models import ModelConfig
from workers.settings import WorkerSettings

LUA = sorted((ROOT / "producer" / "lua").glob("*.lua"))
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
HEAVY = {"celery", "kombu", "onnxruntime", "tensorrt", "pycuda", "torch", "pyarrow", "workers"}


def test_import_producer_is_light() -> None:
    code = "import json, sys, producer; print(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=60,
    )
    loaded = {name.partition(".")[0] for name in json.loads(answer.stdout.splitlines()[-1])}
    assert "producer" in loaded
    assert not loaded & HEAVY


def brought_by(requirements: list[str]) -> set[str]:
    """Names of the distributions that installing `requirements` brings."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in requirement.extras or {""}:
            if (label := f"{name}[{wanted}]") not in found:
                found |= {name, label}
                brought = importlib.metadata.requires(name) or []
                waiting += [(Requirement(text), wanted) for text in brought]
    return found


def test_workers_and_flower_import_with_what_is_declared() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    code = (
        # redis-py imports it where it is installed, and does without it where it is not.
        "import json, sys; sys.modules['opentelemetry'] = None; before = set(sys.modules); "
        "import workers.app, workers.consumer; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60
    )
    imported = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    owners = importlib.metadata.packages_distributions()
    declared = brought_by(project["dependencies"])
    missing = {
        name: owners[name]
        for name in imported & owners.keys() - {"producer", "workers"}
        if not declared & {canonicalize_name(owner) for owner in owners[name]}
    }
    assert "kombu" in imported
    assert not missing


@pytest.mark.parametrize("file", LUA, ids=lambda file: file.stem)
def test_script_loads(file: Path) -> None:
    text = script(file.stem)
    assert file.read_text(encoding="utf-8") in text
    assert "local function now_ms" in text


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling")
def test_wheel_holds_all_that_is_needed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--no-index", "--quiet", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [file for folder in ("producer", "workers") for file in (ROOT / folder).rglob("*.py")]
    needed = {file.relative_to(ROOT).as_posix() for file in (*LUA, *sources)}
    assert len(LUA) > 5
    assert not needed - names
    assert {"producer/py.typed", "workers/py.typed"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "producer",
        "workers",
        "trtq",
    }


def documented(column: str) -> dict[str, str]:
    """First cell -> default cell of the tables whose first column is `column`."""
    found: dict[str, str] = {}
    for table in re.findall(rf"^\| {column} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", CONFIGURATION, re.M):
        for line in table.splitlines():
            name, default, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            found[name.strip("`")] = default.strip("`")
    return found


def variables(settings: type[BaseModel]) -> set[str]:
    """Names of the settings' environment variables."""
    return {f"TRTQ_{field.upper()}" for field in settings.model_fields}


def test_every_variable_is_documented() -> None:
    others = {"TRTQ_AFFINITY", "TRTQ_REDIS_SERVER", "TRTQ_WORKER_NAME"}
    names = variables(ProducerSettings) | variables(WorkerSettings) | others
    assert set(documented("variable")) == names


def test_documented_defaults_of_variables_hold() -> None:
    table = documented("variable")
    for settings in (ProducerSettings, WorkerSettings):
        for field, info in settings.model_fields.items():
            written = table[f"TRTQ_{field.upper()}"]
            expected = info.default
            if isinstance(expected, int | float):
                assert float(written) == expected, field
            else:
                assert written == (expected or "empty"), field


def test_every_model_key_is_documented() -> None:
    assert set(documented("key")) == set(ModelConfig.model_fields)


def test_documented_limits_of_models_hold() -> None:
    table = documented("key")
    for key in ("queue_max_rows", "queue_max_bytes", "max_task_bytes", "max_delay_ms", "threads"):
        assert float(table[key]) == ModelConfig.model_fields[key].default, key


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert pictures
    assert not [file.name for file in pictures if file.stat().st_size > 150_000]
