"""Hooks in a real worker process: the documented example, their failures, and bulk files."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer import Client
from producer.bulk import run_bulk
from producer.errors import HookFailed, InvalidInput, WrongDtype
from producer.spec import TensorSpec
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker
from workers.settings import EXIT_CONFIG

TEXT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("\n## Hooks\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)

GUARDED = """
import numpy as np
from producer.errors import InvalidInput

def preprocess(inputs, into):
    code = inputs["code"]
    if (code == 99).any():
        raise ValueError("ninety-nine")
    if (code == 98).any():
        raise InvalidInput("98 is no code")
    if (code != 97).any():
        into["x"] = np.stack([code, -code], axis=1)

def postprocess(outputs):
    y = outputs["y"]
    if (y[:, 0] == 96).any():
        return {"code": y[:, 0].astype(np.float64)}
    return {} if (y[:, 0] == 95).any() else {"code": y[:, 0]}
"""


def tensor(name: str, dtype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": shape}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documented files, and a model whose hooks fail for some inputs."""
    made = tmp_path_factory.mktemp("hooks")
    shutil.copy(ROOT / "configs" / "models" / "digits.onnx", made)
    for language, text in BLOCKS[:2]:
        name = re.match(r"# (\S+)\n", text)
        assert name is not None, language
        (made / name[1]).write_text(text, encoding="utf-8")
    (made / "guarded_hooks.py").write_text(GUARDED)
    onnx_models.identity_model(made / "guarded.onnx", 2)
    onnx_models.write_config(
        made,
        "guarded",
        max_batch=16,
        max_delay_ms=20,
        preprocess={
            "function": "guarded_hooks:preprocess",
            "inputs": [tensor("code", "float32", [])],
        },
        postprocess={
            "function": "guarded_hooks:postprocess",
            "outputs": [tensor("code", "float32", [])],
        },
    )
    return made


@pytest.fixture(scope="module")
def worker(redis_url: str, folder: Path) -> Iterator[WorkerHandle]:
    """A worker that allows both modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT))))
        handle = start_worker(
            redis_url, folder, bulk_roots=str(folder), hook_modules="digits_hooks, guarded_hooks"
        )
    yield handle
    code = handle.stop()
    print(handle.text[-3000:])
    assert code == 0


@pytest.fixture
def client(redis_url: str, worker: WorkerHandle) -> Iterator[Client]:
    """A connected client."""
    with Client(redis_url) as made:
        yield made


def photos() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], np.ndarray[Any, Any]]:
    """Handwritten digits that the model was not trained on, as 8-bit images, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    half = len(data.images) // 2
    images = np.rint(data.images[half:, :, :, None] * (255 / 16)).astype(np.uint8)
    return images, data.target[half:]


def test_what_is_documented() -> None:
    assert [language for language, _ in BLOCKS] == ["yaml", "python", "sh", "python"]
    assert "TRTQ_HOOK_MODULES=digits_hooks " in BLOCKS[2][1]


def test_the_documented_request(
    redis_url: str, worker: WorkerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTQ_REDIS_URL", redis_url)
    exec(compile(BLOCKS[3][1], "docs/configuration.md", "exec"), {})


def test_images_in_and_the_likeliest_digits_out(client: Client) -> None:
    spec = client.spec("photos")
    assert spec.inputs == (TensorSpec(name="photo", dtype="uint8", shape=(8, 8, 1)),)
    assert spec.outputs == (
        TensorSpec(name="digit", dtype="int64", shape=(3,)),
        TensorSpec(name="probability", dtype="float32", shape=(3,)),
    )
    images, labels = photos()
    answers = list(client.map("photos", images))
    best = np.array([answer["digit"][0] for answer in answers])
    assert (best == labels).mean() >= 0.97
    for answer in answers:
        assert len(set(answer["digit"])) == 3
        assert (np.diff(answer["probability"]) <= 0).all()
        assert 0.3 < answer["probability"].sum() <= 1.0001
    with pytest.raises(WrongDtype, match="'photo'"):
        client.submit("photos", images[0].astype(np.float32))


def test_the_models_were_warmed_through_their_hooks(worker: WorkerHandle) -> None:
    assert "model 'photos' is warm" in worker.text
    assert "warm-up of 'photos'" not in worker.text


def test_bulk_files_hold_what_the_hooks_take_and_give(client: Client, folder: Path) -> None:
    images, labels = photos()
    np.save(folder / "photos.npy", images)
    summary = run_bulk(client, "photos", folder / "photos.npy", folder / "digits")
    assert (summary.rows, summary.failed) == (len(images), 0)
    digits = np.load(folder / "digits" / "digit.npy")
    assert digits.dtype == np.int64
    assert (digits[:, 0] == labels).mean() >= 0.97
    assert np.load(folder / "digits" / "probability.npy").shape == (len(images), 3)


def test_a_failing_hook_fails_its_own_tasks_and_nothing_else(
    client: Client, worker: WorkerHandle
) -> None:
    wanted = {
        99: (HookFailed, r"model 'guarded': preprocess .* raised ValueError: ninety-nine"),
        98: (InvalidInput, r"^98 is no code$"),
        97: (HookFailed, r"preprocess .* did not fill the model's input 'x'"),
        96: (HookFailed, r"model 'guarded': postprocess .* 'code' as float64, not float32"),
        95: (HookFailed, r"postprocess .* returned outputs \[\], not \['code'\]"),
    }
    codes = [95 + n % 5 if n % 7 == 3 else n % 50 for n in range(100)]
    assert set(wanted) < set(codes)
    tickets = [client.submit("guarded", np.float32(code)) for code in codes]
    for code, ticket in zip(codes, tickets, strict=True):
        if code in wanted:
            error, words = wanted[code]
            with pytest.raises(error, match=words):
                ticket.result(30)
        else:
            assert ticket.result(30) == code
    assert worker.process.poll() is None
    assert "ninety-nine" in worker.text


def test_rows_of_a_file_that_a_hook_refuses_are_listed(client: Client, folder: Path) -> None:
    codes = np.arange(40, dtype=np.float32)
    codes[[5, 6, 30]] = 99, 98, 96
    np.save(folder / "codes.npy", codes)
    summary = run_bulk(client, "guarded", folder / "codes.npy", folder / "out.npy")
    assert (summary.rows, summary.failed) == (40, 3)
    found = np.load(folder / "out.npy")
    assert np.flatnonzero(np.isnan(found)).tolist() == [5, 6, 30]
    np.testing.assert_array_equal(found[~np.isnan(found)], np.delete(codes, [5, 6, 30]))
    lines = (folder / "out.npy.errors.jsonl").read_text().splitlines()
    assert {line["row"]: line["code"] for line in map(json.loads, lines)} == {
        5: "hook_failed",
        6: "invalid_input",
        30: "hook_failed",
    }


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        ("", "add guarded_hooks to TRTQ_HOOK_MODULES"),
        ("digits_hooks", "add guarded_hooks to TRTQ_HOOK_MODULES"),
        ("guarded_hooks,digits_hooks", "put its folder into PYTHONPATH"),
        ("guarded hooks", "is no module name"),
    ],
)
def test_a_worker_that_may_not_or_cannot_import_a_hook_does_not_start(
    redis_url: str, folder: Path, allowed: str, words: str
) -> None:
    worker = start_worker(redis_url, folder, name="refused", wait=False, hook_modules=allowed)
    try:
        assert worker.process.wait(60) == EXIT_CONFIG
    finally:
        worker.kill()
    assert words in worker.text
