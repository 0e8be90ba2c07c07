"""What is shipped: imports, wheel, compose file, and documentation that is complete."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from producer.config import ProducerSettings
from producer.scripts import script
from tests.support.processes import ROOT
from workers.models import ModelConfig
from workers.settings import WorkerSettings

LUA = sorted((ROOT / "producer" / "lua").glob("*.lua"))
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
HEAVY = {"celery", "kombu", "onnxruntime", "tensorrt", "pycuda", "torch", "pyarrow", "workers"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The compose file."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    return loaded


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
    names = variables(ProducerSettings) | variables(WorkerSettings)
    assert set(documented("variable")) == names | {"TRTQ_AFFINITY", "TRTQ_REDIS_SERVER"}


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


def test_compose_publishes_on_loopback_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_holds_no_secret(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|AUTH|SECRET|TOKEN", key):
                assert re.fullmatch(r"\$\{[A-Z_]+:\?[^}]*\}", value), (name, key)
            password = re.search(r"://[^@/:]*:([^@]*)@", value)
            assert password is None or password[1].startswith("${"), (name, key)
        assert not re.search(r"requirepass [^%]", json.dumps(service.get("command", ""))), name


def test_compose_protects_redis_and_keeps_its_data(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    command = " ".join(redis["command"])
    assert "requirepass" in command
    assert "appendonly yes" in command
    assert "noeviction" in command
    assert any(volume.endswith(":/data") for volume in redis["volumes"])


def test_compose_has_the_services(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {"redis", "worker-cpu", "worker-gpu", "flower"} <= set(services)
    (device,) = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert "gpu" in device["capabilities"]
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    for service in services.values():
        build = service.get("build")
        assert build is None or (ROOT / build["dockerfile"]).is_file()


def test_image_does_not_run_as_root() -> None:
    text = (ROOT / "docker" / "Dockerfile.worker-cpu").read_text(encoding="utf-8")
    users = re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)
    assert users
    assert users[-1] not in ("root", "0")
