import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy_format

from producer.errors import FileFormat, FileMissing, OutputFailed, OutputMismatch
from producer.npy import create_npy, parse_header, read_npy_header
from producer.spec import DTYPES, TensorSpec


def header_bytes(text: str, version: int = 1) -> bytes:
    body = text.encode()
    size = len(body).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + body


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_header_of_what_numpy_saves(tmp_path: Path, dtype: str) -> None:
    array = np.ones((5, 2, 3), dtype)
    np.save(tmp_path / "a.npy", array)
    header = read_npy_header(tmp_path / "a.npy")
    assert (header.dtype, header.shape, header.rows) == (array.dtype, array.shape, 5)
    assert header.row_bytes == array[0].nbytes
    assert header.file_bytes == (tmp_path / "a.npy").stat().st_size
    assert header.matches(TensorSpec(name="x", dtype=dtype, shape=(2, None)))
    assert not header.matches(TensorSpec(name="x", dtype=dtype, shape=(2, 4)))
    assert not header.matches(TensorSpec(name="x", dtype=dtype, shape=(2,)))


def test_version_2_is_read(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        npy_format.write_array(file, np.arange(4), version=(2, 0))
    assert read_npy_header(tmp_path / "a.npy").shape == (4,)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.asfortranarray(np.ones((4, 3))), "Fortran"),
        (np.ones(3, ">f4"), "big-endian"),
        (np.zeros(3, [("a", "f4")]), "structures"),
        (np.array([None, {}], object), "objects"),
        (np.array(["text"]), "dtype"),
        (np.ones(3, complex), "complex128"),
        (np.zeros(2, "datetime64[s]"), "datetime64"),
        (np.float32(1), "leading axis"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path: Path, array: Any, says: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(FileFormat, match=says):
        read_npy_header(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{[]: 1}",
        "{'descr': '<f4'}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0x" + "f" * 6000 + ",)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387903, 8)}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
        "{'descr': 7, 'fortran_order': False, 'shape': (1,)}",
        "{'descr': ('<f4', (2,)), 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "(" * 3000,
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + " " * 20_000,
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3, 9])
def test_bad_headers_are_file_format(text: str, version: int) -> None:
    with pytest.raises(FileFormat, match=r"x\.npy"):
        parse_header(header_bytes(text, version), "x.npy")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([1, 2]))
def test_garbage_is_file_format(body: bytes, version: int) -> None:
    for start in (
        body,
        b"\x93NUMPY" + body,
        b"\x93NUMPY" + bytes([version, 0, len(body) & 255, len(body) >> 8, 0, 0]) + body,
    ):
        with pytest.raises(FileFormat):
            parse_header(start, "x.npy")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_header_never_raises_anything_else(data: st.DataObject) -> None:
    stream = io.BytesIO()
    np.save(stream, np.zeros((3, 4), np.float32))
    content = bytearray(stream.getvalue()[:128])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 80))] = data.draw(st.integers(0, 255))
    try:
        header = parse_header(bytes(content), "x.npy")
    except FileFormat:
        return
    assert header.dtype.name in DTYPES
    assert all(size >= 0 for size in header.shape)
    assert 0 < header.data_offset <= 128


def test_cut_off_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((10, 4)))
    os.truncate(tmp_path / "a.npy", 300)
    with pytest.raises(FileFormat, match="448 bytes, it has 300"):
        read_npy_header(tmp_path / "a.npy")


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(FileMissing):
            read_npy_header(path)


def test_create_is_sparse_and_like_numpys(tmp_path: Path) -> None:
    header = create_npy(tmp_path / "a.npy", "float32", (1 << 20, 4))
    status = (tmp_path / "a.npy").stat()
    assert status.st_size == header.file_bytes
    assert status.st_blocks * 512 < 1 << 20
    create_npy(tmp_path / "b.npy", "int16", (3, 2), 7)
    np.save(tmp_path / "c.npy", np.full((3, 2), 7, np.int16))
    assert (tmp_path / "b.npy").read_bytes() == (tmp_path / "c.npy").read_bytes()
    create_npy(tmp_path / "d.npy", "float64", (2, 3), float("nan"))
    assert np.isnan(np.load(tmp_path / "d.npy")).all()


def test_create_refuses_what_exists(tmp_path: Path) -> None:
    create_npy(tmp_path / "a.npy", "uint8", (1,), 1)
    with pytest.raises(OutputMismatch, match="exists"):
        create_npy(tmp_path / "a.npy", "uint8", (2,))
    create_npy(tmp_path / "a.npy", "uint8", (2,), overwrite=True)
    assert np.load(tmp_path / "a.npy").tolist() == [0, 0]


def test_create_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(OutputFailed, match="cannot be created"):
        create_npy(tmp_path / "a.npy", "float64", (1 << 61, 4))
    with pytest.raises(OutputFailed, match="No such file"):
        create_npy(tmp_path / "none" / "a.npy", "float64", (1,))
    assert os.listdir(tmp_path) == []
