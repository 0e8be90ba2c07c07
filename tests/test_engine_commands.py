"""`trtq build` and `trtq inspect`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from producer.cli import app
from producer.commands.engines import _show
from tests.support import models


@pytest.fixture
def runner(tmp_path: Path) -> CliRunner:
    return CliRunner(env={"TRTQ_PLAN_CACHE": str(tmp_path / "cache"), "COLUMNS": "200"})


def test_build_from_a_model_file_then_from_the_cache(runner: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    models.identity_model(tmp_path / "m.onnx", 4)
    config = models.write_config(tmp_path, "m", engine="tensorrt", max_batch=8)
    output = tmp_path / "m.plan"
    first = runner.invoke(app, ["build", str(config), "--output", str(output), "--json"])
    assert first.exit_code == 0, first.output
    made = json.loads(first.stdout)
    assert made["from_cache"] is False
    assert output.stat().st_size == made["size_bytes"]
    again = runner.invoke(app, ["build", str(tmp_path / "m.onnx"), "--max-batch", "8"])
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith("found ")


def test_wrong_files_are_refused(runner: CliRunner, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    absent = runner.invoke(app, ["build", str(tmp_path / "absent.onnx")])
    assert absent.exit_code == 2
    assert "error [model_file]" in absent.stderr
    (tmp_path / "bad.plan").write_bytes(b"no plan")
    refused = runner.invoke(app, ["inspect", str(tmp_path / "bad.plan")])
    assert refused.exit_code == 2
    assert "error [engine_mismatch]" in refused.stderr


def test_what_inspect_shows(capsys: pytest.CaptureFixture[str]) -> None:
    _show(
        {
            "flavor": "tensorrt_rtx",
            "version": "1",
            "size_bytes": 2000,
            "device_memory_bytes": 512,
            "bindings": [{"name": "x", "kind": "input", "dtype": "float", "shape": [-1, 4]}],
            "profiles": [{"x": [[1, 4], [2, 4], [8, 4]]}],
            "layers": ["conv[1]"],
        }
    )
    shown = capsys.readouterr().out
    assert "[1, 4] [2, 4] [8, 4]" in shown
    assert "conv[1]" in shown
    assert "512 bytes, 1 layers" in shown
