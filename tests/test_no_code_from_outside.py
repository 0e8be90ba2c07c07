"""Nothing that comes from outside can become code: by the source, and by a real worker."""

from __future__ import annotations

import ast
import base64
import json
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import redis
import yaml

from producer import Client, keys
from producer.bell import ID, bell_message
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker, until
from workers import models
from workers.app import app

SOURCES = sorted(
    file for package in ("producer", "workers") for file in (ROOT / package).rglob("*.py")
)
#: Modules that turn bytes into code or objects of any class.
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"} | {
    "jsonpickle",
    "torch",
    "code",
    "codeop",
    "runpy",
    "imp",
}
#: Names that are never called, also not as attributes of a module.
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
YAML = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}
#: The one module that is imported by a name that is no constant: one of three, in its file.
ALLOWED = {
    ("workers/tensorrt/flavor.py", "import_module of a value"),
    # Only modules that TRTQ_HOOK_MODULES names.
    ("workers/engines/hook_functions.py", "import_module of a value"),
    # With a loader that is a SafeLoader; another test holds it to that.
    ("workers/models.py", "yaml.load"),
}


def offences(tree: ast.AST) -> Iterator[str]:
    """What in a module could turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if root_of(alias.name) in MODULES)
        elif isinstance(node, ast.ImportFrom) and root_of(node.module or "") in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom) and node.module in ("yaml", "numpy", "importlib"):
            bad = YAML | {"load", "import_module"}
            yield from (alias.name for alias in node.names if alias.name in bad)
        elif isinstance(node, ast.Call):
            yield from offending_call(node)


def root_of(module: str) -> str:
    return module.partition(".")[0]


def offending_call(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in CALLS:
        yield function.id
    if not isinstance(function, ast.Attribute):
        return
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    options = {option.arg: option.value for option in node.keywords}
    if owner == "builtins" and function.attr in CALLS:
        yield function.attr
    if owner == "yaml" and function.attr in YAML:
        yield f"yaml.{function.attr}"
    if owner in ("np", "numpy") and function.attr == "load":
        allowed = options.get("allow_pickle")
        if not (isinstance(allowed, ast.Constant) and allowed.value is False):
            yield "np.load without allow_pickle=False"
    if function.attr in ("import_module", "import_string", "symbol_by_name"):
        name = node.args[0] if node.args else None
        constant = isinstance(name, ast.Constant) or (
            isinstance(name, ast.Name) and name.id.isupper()
        )
        if not constant:
            yield f"{function.attr} of a value"
    if "shell" in options or (owner == "os" and function.attr in ("system", "popen")):
        yield f"{owner}.{function.attr} with a shell"


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_source_turns_data_into_code(file: Path) -> None:
    name = str(file.relative_to(ROOT))
    found = set(offences(ast.parse(file.read_text(encoding="utf-8"))))
    assert {what for what in found if (name, what) not in ALLOWED} == set()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.serialization",
        "import yaml; yaml.load(x, yaml.Loader)",
        "from yaml import unsafe_load",
        "import numpy as np; np.load(f)",
        "import numpy as np; np.load(f, allow_pickle=True)",
        "from numpy import load",
        "eval(x)",
        "import builtins; builtins.exec(x)",
        "import importlib; importlib.import_module(name)",
        "import subprocess; subprocess.run(x, shell=True)",
        "import os; os.system(x)",
    ],
)
def test_the_search_finds(text: str) -> None:
    assert list(offences(ast.parse(text)))


def test_celery_accepts_json_only() -> None:
    assert set(app.conf.accept_content) == {"json"}
    assert app.conf.result_accept_content in (None, ["json"])
    assert app.conf.task_serializer == app.conf.result_serializer == "json"
    assert app.conf.event_serializer == "json"


@pytest.fixture(scope="module")
def worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerHandle]:
    folder = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(folder / "checksum.onnx", 16)
    onnx_models.write_config(folder, "checksum")
    made = start_worker(redis_url, folder)
    yield made
    made.stop()


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def poisoned(content_type: str, encoding: str, body: bytes) -> bytes:
    """A bell whose body is of another kind."""
    bell = bell_message("checksum", "test").replace(ID.encode(), uuid.uuid4().hex.encode())
    message = json.loads(bell)
    message["content-type"] = content_type
    message["content-encoding"] = encoding
    message["body"] = base64.b64encode(body).decode()
    return json.dumps(message).encode()


@pytest.mark.parametrize("kind", ["pickle", "msgpack", "yaml"])
def test_a_worker_refuses_other_messages_and_lives(
    kind: str, worker: WorkerHandle, redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    bomb = tmp_path / "exploded"
    body = ["checksum", "test"], {}, {}
    message = {
        "pickle": lambda: poisoned(
            "application/x-python-serialize", "binary", pickle.dumps([Bomb(bomb), {}, {}])
        ),
        "msgpack": lambda: poisoned("application/x-msgpack", "binary", msgpack.packb(body)),
        "yaml": lambda: poisoned(
            "application/x-yaml", "utf-8", f"!!python/object/apply:os.mknod ['{bomb}']".encode()
        ),
    }[kind]()
    refusals = worker.text.count("ContentDisallowed")
    connection.lpush(keys.bell_queue("checksum"), message)
    until(lambda: worker.text.count("ContentDisallowed") > refusals)
    row = np.arange(16, dtype=np.uint8)
    until(lambda: connection.hexists(keys.MODELS, "checksum"))
    with Client(redis_url) as client:
        assert client.submit("checksum", row).result(20) == onnx_models.checksum(row[None])[0]
    assert worker.process.poll() is None
    assert not bomb.exists()
    assert connection.llen(keys.bell_queue("checksum")) == 0


def test_a_pickled_bell_would_explode(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps([Bomb(tmp_path / "exploded")]))
    assert (tmp_path / "exploded").exists()


def test_the_loader_of_model_files_is_a_safe_one() -> None:
    assert issubclass(models._Loader, yaml.SafeLoader)
    assert models._Loader.yaml_constructors == yaml.SafeLoader.yaml_constructors
