"""The README's Python runs as it stands, and its tables and links are true."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producer import errors
from tests.support.processes import ROOT, start_worker

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What earlier blocks defined: a reader runs them from top to bottom."""
    return {"__name__": "readme"}


@pytest.fixture(scope="module")
def folder(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder that the workers of the digits model may use for bulk jobs."""
    made = tmp_path_factory.mktemp("readme")
    models = made / "models"
    models.mkdir()
    for name in ("digits.yaml", "digits.onnx"):
        shutil.copy(ROOT / "configs" / "models" / name, models)
    worker = start_worker(redis_url, models, wait=False, bulk_roots=str(made))
    infer = start_worker(
        redis_url, models, name="infer", queues="trtq.infer", concurrency=4, wait=False
    )
    try:
        worker.wait_ready()
        infer.wait_ready()
        yield made
    finally:
        infer.stop()
        worker.stop()


def test_the_readme_has_examples() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_example_runs(
    number: int,
    folder: Path,
    redis_url: str,
    namespace: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRTQ_REDIS_URL", redis_url)
    monkeypatch.chdir(folder)
    exec(compile(BLOCKS[number], f"README.md, example {number}", "exec"), namespace)


def test_error_table_is_the_tree() -> None:
    rows = re.findall(r"^\| (?:- )?`(\w+)` \| `(\w+)` \|", TEXT, flags=re.MULTILINE)
    assert {code: name for name, code in rows} == {
        code: kind.__name__ for code, kind in errors.BY_CODE.items()
    }


def test_linked_files_exist() -> None:
    links = set(re.findall(r"\]\(([\w./-]+)\)", TEXT))
    assert not {link for link in links if not (ROOT / link).is_file()}
