"""Targets: files of users and operators, written anew into a folder in memory for every input."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from producer.bulk.columns import convert
from producer.bulk.job import _check_recorded
from producer.bulk.journal import Journal
from producer.bulk.plan import ChunkPlan
from producer.commands.arrays import read_inputs
from producer.npy import parse_header, read_npy_header
from producer.spec import ModelSpec, TensorSpec
from tests.fuzz.judge import Target
from workers.files import RowFiles
from workers.models import load_model
from workers.tensorrt.cache import PlanCache

_X = TensorSpec(name="x", dtype="float32", shape=(3,))
_SPEC = ModelSpec(name="m", inputs=(_X,), outputs=(_X,), max_batch=8, max_rows_per_task=8)
_ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)
_MEMORY = Path("/dev/shm")


def _inside(use: Callable[[Path, bytes], object]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            use(Path(folder), data)

    return run


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def _npz(save: Callable[..., None], **named: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, **named)
    return stream.getvalue()


_NPYS = [
    _npy(_ROWS),
    _npy(np.asfortranarray(_ROWS)),
    _npy(_ROWS.astype(">i8")),
    _npy(np.array([{}], object)),
    _npy(np.zeros(2, [("a", "f4")])),
]


def _header(text: str) -> bytes:
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text.encode()


def _huge_headers() -> list[bytes]:
    described = "{{'descr': {}, 'fortran_order': False, 'shape': {}}}"
    return [
        _header(described.format("'<f4'", "(9223372036854775807,)")),
        _header(described.format("'<f4'", "(" + "9" * 4000 + ",)")),
        _header(described.format("'<f4'", "(" + "1," * 2000 + ")")),
        _header(described.format("'(2147483647,)<f8'", "(1,)")),
        _header(described.format("'<U99999999'", "(1,)")),
        _header(described.format("[" + "('a', '<f4')," * 400 + "]", "(1,)")),
        _header("(" * 9000),
        _header("-" * 9000 + "1"),
        _header("[" * 100 + "]" * 100),
    ]


def _bombs() -> list[bytes]:
    zeros = io.BytesIO()
    with zipfile.ZipFile(zeros, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", _npy(np.zeros(4 << 20, np.uint8)))
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(2000):
            archive.writestr(f"{number}.npy", b"")
    return [zeros.getvalue(), many.getvalue()]


def _read_inputs(data: bytes) -> None:
    read_inputs("-", io.BytesIO(data))


def _rows(folder: Path, data: bytes) -> None:
    path = folder / "in.npy"
    path.write_bytes(data)
    header = read_npy_header(path)
    files = RowFiles([folder])
    try:
        files.read_rows(str(path), 0, 2, np.zeros((2, 3), np.float32), _X)
        assert header.rows >= 2
        files.write_rows(str(path), 0, np.zeros((2, 3), np.float32), _X)
    finally:
        files.close()


def _state(header: dict[str, Any], *lines: str) -> bytes:
    return "".join([json.dumps(header) + "\n", *(line + "\n" for line in lines)]).encode()


_RECORD: dict[str, Any] = {
    "version": 2,
    "model": "m",
    "spec": _SPEC.model_dump(mode="json", include={"name", "inputs", "outputs"}),
    "inputs": [{"path": "/in.npy", "size": 248, "mtime_ns": 1, "inode": 2}],
    "rows": 100,
    "rows_per_task": 8,
}


def _journal(folder: Path, data: bytes) -> None:
    path = folder / "out.npy.state"
    path.write_bytes(data)
    journal, plan = Journal(path, "boot"), ChunkPlan(100, 8)
    journal.open()
    try:
        recorded = journal.header()
        journal.replay(plan)
        assert 0 <= plan.done_rows <= 100
        if recorded is not None:
            assert 1 <= _check_recorded(recorded, _RECORD, None, _SPEC) <= 8
    finally:
        journal.close()


def _yaml(folder: Path, data: bytes) -> None:
    path = folder / "m.yaml"
    path.write_bytes(data)
    config = load_model(path)
    assert config.max_batch >= 1


def _laughs(levels: int, merge: bool) -> bytes:
    lines = ["a0: &a0 {k: 1}"]
    for level in range(1, levels):
        uses = f"[{', '.join([f'*a{level - 1}'] * 9)}]"
        lines.append(f"a{level}: &a{level} " + (f"{{<<: {uses}}}" if merge else uses))
    return "\n".join([*lines, f"path: *a{levels - 1}"]).encode()


def _columns(suffix: str) -> Callable[[Path, bytes], None]:
    def run(folder: Path, data: bytes) -> None:
        path = folder / f"in{suffix}"
        path.write_bytes(data)
        convert(_SPEC, path, folder / "converted.npy")
        assert read_npy_header(folder / "converted.npy").row_shape == (3,)

    return run


def _tables(suffix: str) -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lists = pa.FixedSizeListArray.from_arrays(pa.array(_ROWS.reshape(-1)), 3)
    found = []
    for table in (
        pa.table({"x": lists}),
        pa.table({"x": lists.cast(pa.list_(pa.float32())), "id": np.arange(10)}),
        pa.table({name: _ROWS[:, place] for place, name in enumerate("abc")}),
    ):
        stream = io.BytesIO()
        if suffix == ".parquet":
            pq.write_table(table, stream)
        else:
            with pa.ipc.new_file(stream, table.schema) as file:
                file.write_table(table, 4)
        found.append(stream.getvalue())
    return found


_FACTS = {"flavor": "tensorrt", "gpu": "none"}


def _sidecar(folder: Path, data: bytes) -> None:
    (folder / "k.plan").write_bytes(b"plan")
    (folder / "k.json").write_bytes(data)
    assert PlanCache(folder, 1 << 20).get("k", _FACTS) in (None, b"plan")


def _sidecars() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        PlanCache(Path(folder), 1 << 20).put("k", b"plan", _FACTS)
        return [Path(folder, "k.json").read_bytes()]


TARGETS = [
    Target(
        "npy header",
        lambda data: parse_header(data, "x.npy"),
        lambda: _NPYS,
        _huge_headers,
        200,
    ),
    Target(
        "bulk npy file",
        _inside(_rows),
        lambda: _NPYS,
        _huge_headers,
        200,
    ),
    Target(
        "submitted file",
        _read_inputs,
        lambda: [
            *_NPYS,
            _npz(np.savez, a=_ROWS, b=_ROWS[0]),
            _npz(np.savez_compressed, a=_ROWS, b=_ROWS[0]),
            b'{"x": [[1, 2.5], [3, 4]]}',
        ],
        lambda: [*_huge_headers(), *_bombs(), b"[" * 100_000, b"[{}," * 900, b"9" * 100_000],
        # Deflate makes at most 1032 bytes of one, held as pieces and then as a whole.
        2200,
    ),
    Target(
        "job state",
        _inside(_journal),
        lambda: [
            _state(_RECORD, "boot boot", "done 0", "done 3", "sync", "done 4"),
            _state(_RECORD, "finished"),
        ],
        lambda: [
            b"[" * 500_000 + b"\n",
            b"x" * (2 << 20),
            _state(_RECORD, *["done 1"] * 50_000),
            _state({**_RECORD, "rows": "x" * 500_000}),
            _state({**_RECORD, "spec": {str(i): i for i in range(20_000)}}),
        ],
        200,
    ),
    Target(
        "model YAML",
        _inside(_yaml),
        lambda: [
            b"path: a.onnx\nmax_batch: 64\nmax_delay_ms: 2.5\nthreads: 1\n",
            b"name: n\nengine: tensorrt\npath: a.onnx\nslots: 3\nforbid_nan: true\nbuild:\n"
            b"  fp16: true\n  profiles:\n    - opt_batch: 8\n      max_batch: 16\n"
            b"      axes: {x: [[1, 2, 3]]}\n"
            b"  prepare: {x: {layout: nchw, mean: [0.5], std: [0.25]}}\n",
        ],
        lambda: [
            _laughs(12, merge=False),
            _laughs(12, merge=True),
            b"[" * 16_000,
            b"{a: " * 4_000,
            b"path: a\nmax_batch: " + b"9" * 16_000,
            b"? " * 8_000,
            b"- " * 8_000,
            b"path: a\nbuild: {profiles: [" + b"{}," * 5_000 + b"]}",
            b"#" * 1_000_000,
        ],
        # PyYAML, in Python, keeps several objects for each token of one character.
        800,
    ),
    Target(
        "plan sidecar",
        _inside(_sidecar),
        _sidecars,
        lambda: [b"[" * 100_000, b"9" * 100_000, b'{"facts": {}}' * 1000],
        200,
    ),
]


def column_targets() -> list[Target]:
    """Targets that need pyarrow; its memory is not Python's and is bounded by the process only."""
    return [
        Target(
            f"{suffix[1:]} file",
            _inside(_columns(suffix)),
            lambda suffix=suffix: _tables(suffix),  # type: ignore[misc]
            lambda: [b"PAR1" + os.urandom(100) + b"PAR1", b"ARROW1\0\0" + b"\xff" * 100],
            200,
        )
        for suffix in (".parquet", ".arrow")
    ]
