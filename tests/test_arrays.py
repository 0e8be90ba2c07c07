"""Arrays of callers: files for `trtq submit` and texts for `trtq.infer`, whatever they promise."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.commands import arrays
from producer.commands.arrays import read_inputs, write_outputs
from producer.errors import FileFormat, FileMissing, InvalidInput
from workers.tasks import from_plain


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(compress: bool = False, **named: Any) -> bytes:
    stream = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(stream, **named)
    return stream.getvalue()


def promising(shape: str) -> bytes:
    """A .npy of a hundred bytes whose header promises `shape`."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 8


def by_file(content: bytes) -> Any:
    return read_inputs("-", io.BytesIO(content))


def by_text(content: bytes) -> Any:
    return from_plain(base64.b64encode(content).decode())


READERS = pytest.mark.parametrize("read", [by_file, by_text])


@READERS
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.float64(2.5),
        np.zeros((0, 4), np.uint8),
        np.array([True, False]),
    ],
)
def test_arrays_come_back(read: Callable[[bytes], Any], array: Any) -> None:
    found = read(npy(array))
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@READERS
@pytest.mark.parametrize(
    "shape", ["(1000000000,)", "(2**40,)", "(9007199254740991, 1024)", "(0, 9223372036854775807)"]
)
def test_nothing_of_the_promised_size_is_allocated(
    read: Callable[[bytes], Any], shape: str
) -> None:
    content = promising(shape)
    tracemalloc.start()
    try:
        with pytest.raises((FileFormat, InvalidInput)):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text", ["no base64!", "AAAA", "", "\xe9", b"\xff", base64.b64encode(b"a")]
)
def test_texts_that_are_no_array(text: Any) -> None:
    with pytest.raises(InvalidInput, match="base64"):
        from_plain(text)


def test_plain_inputs() -> None:
    assert from_plain([1, 2]) == [1, 2]
    both = from_plain({"a": base64.b64encode(npy(np.ones(2))), "b": [3]})
    assert both["a"].tolist() == [1, 1]
    assert both["b"] == [3]
    assert from_plain({"a": {"b": 1}}) == {"a": {"b": 1}}


@pytest.mark.parametrize("compress", [False, True])
def test_an_archive(compress: bool) -> None:
    found = by_file(npz(compress, a=np.ones((2, 3)), b=np.arange(3)))
    assert sorted(found) == ["a", "b"]
    assert found["b"].tolist() == [0, 1, 2]


def test_an_archive_that_unpacks_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    content = npz(True, a=np.zeros(1 << 20, np.uint8))
    assert len(content) < 5000
    assert by_file(content)["a"].nbytes == 1 << 20
    monkeypatch.setattr(arrays, "_MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(FileFormat, match="when unpacked"):
        by_file(content)


def test_an_archive_that_lies_about_a_size() -> None:
    content = npz(a=np.zeros(100))
    at = content.rindex(struct.pack("<I", len(npy(np.zeros(100)))))

    def lying(size: int) -> bytes:
        return content[:at] + struct.pack("<I", size) + content[at + 4 :]

    with pytest.raises(FileFormat, match="CRC"):
        by_file(lying(200))
    tracemalloc.start()
    try:
        assert by_file(lying(200 << 20))["a"].tolist() == [0] * 100
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_members_that_numpy_does_not_write() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.npy", npy(np.ones(2)))
    with pytest.raises(FileFormat, match="deflate"):
        by_file(stream.getvalue())
    encrypted = bytearray(npz(a=np.ones(2)))
    for start in (encrypted.index(b"PK\3\4") + 6, encrypted.index(b"PK\1\2") + 8):
        encrypted[start] |= 1
    with pytest.raises(FileFormat, match="encrypted"):
        by_file(bytes(encrypted))
    objects = io.BytesIO()
    np.savez(objects, a=np.array([{}], object))
    with pytest.raises(FileFormat, match="objects"):
        by_file(objects.getvalue())


@pytest.mark.parametrize(
    "content", [b"", b"null", b'"' + b"x" * 10_000 + b'"', b"[" * 100_000, b"PK\3\4", b"\x93NUMPY"]
)
def test_what_is_no_input(content: bytes) -> None:
    with pytest.raises(FileFormat) as refused:
        by_file(content)
    assert len(refused.value.message) < 1000


def test_a_name_that_is_no_path() -> None:
    with pytest.raises(FileMissing):
        read_inputs("a\0b", io.BytesIO())


def test_outputs_keep_their_names(tmp_path: Path) -> None:
    write_outputs(tmp_path / "a.npz", {"file": np.ones(2), "allow_pickle": np.arange(3)})
    with np.load(tmp_path / "a.npz") as found:
        assert sorted(found.files) == ["allow_pickle", "file"]
        assert found["file"].tolist() == [1, 1]
