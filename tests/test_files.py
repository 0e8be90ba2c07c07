import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.errors import (
    FileChanged,
    FileFormat,
    FileMissing,
    OutputFailed,
    OutputMismatch,
    PathNotAllowed,
)
from producer.npy import create_npy
from producer.spec import TensorSpec
from workers.files import RowFiles

SPEC = TensorSpec(name="x", dtype="float32", shape=(3,))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.fixture
def files(root: Path) -> Iterator[RowFiles]:
    files = RowFiles([root])
    yield files
    files.close()


def saved(path: Path, rows: int = 10) -> np.ndarray[Any, Any]:
    array = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    np.save(path, array)
    return array


def read(files: RowFiles, path: Path | str, start: int = 0, stop: int = 2) -> Any:
    into = np.full((stop - start, 3), -1, np.float32)
    files.read_rows(str(path), start, stop, into, SPEC)
    return into


def test_rows_are_read_and_written(root: Path, files: RowFiles) -> None:
    array = saved(root / "a.npy")
    np.testing.assert_array_equal(read(files, root / "a.npy", 4, 9), array[4:9])
    assert read(files, root / "a.npy", 4, 4).shape == (0, 3)
    create_npy(root / "b.npy", "float32", (10, 3))
    files.write_rows(str(root / "b.npy"), 2, array[5:7], SPEC)
    files.write_rows(str(root / "b.npy"), 8, array[::-1][:2], SPEC)
    want = np.zeros_like(array)
    want[2:4], want[8:] = array[5:7], array[::-1][:2]
    np.testing.assert_array_equal(np.load(root / "b.npy"), want)


@pytest.mark.parametrize("dtype", ["bool", "float16", "int64", "uint8"])
def test_every_dtype_travels(root: Path, files: RowFiles, dtype: str) -> None:
    spec = TensorSpec(name="x", dtype=dtype, shape=())
    array = np.arange(6).astype(dtype)
    create_npy(root / "a.npy", dtype, (6,))
    files.write_rows(str(root / "a.npy"), 0, array, spec)
    into = np.empty(3, dtype)
    files.read_rows(str(root / "a.npy"), 1, 4, into, spec)
    assert into.tolist() == array[1:4].tolist()


def test_outside_of_the_roots(root: Path, tmp_path: Path, files: RowFiles) -> None:
    saved(tmp_path / "out.npy")
    (root / "link.npy").symlink_to(tmp_path / "out.npy")
    (root / "folder").symlink_to(tmp_path)
    (tmp_path / "rootless").mkdir()
    saved(tmp_path / "rootless" / "a.npy")
    for path in (
        tmp_path / "out.npy",
        root / "link.npy",
        root / "folder" / "out.npy",
        f"{root}/../out.npy",
        tmp_path / "rootless" / "a.npy",
        "root/a.npy",
        "bad\0path",
        "/etc/passwd",
    ):
        with pytest.raises(PathNotAllowed):
            read(files, path)
        with pytest.raises(PathNotAllowed):
            files.write_rows(str(path), 0, np.zeros((1, 3), np.float32), SPEC)
    with pytest.raises(PathNotAllowed, match="TRTQ_BULK_ROOTS"):
        read(RowFiles([]), root / "a.npy")


def test_a_root_may_itself_be_a_symlink(root: Path, tmp_path: Path) -> None:
    array = saved(root / "a.npy")
    (root / "inner.npy").symlink_to("a.npy")
    (tmp_path / "alias").symlink_to(root)
    files = RowFiles([tmp_path / "alias"])
    for path in (root / "a.npy", tmp_path / "alias" / "a.npy", root / "inner.npy"):
        np.testing.assert_array_equal(read(files, path), array[:2])
    files.close()


def test_what_is_no_usable_file(root: Path, files: RowFiles) -> None:
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to("loop")
    for name in ("none.npy", "pipe", ".", "loop", "n" * 300):
        with pytest.raises(FileMissing):
            read(files, f"{root}/{name}")
    (root / "text.npy").write_text("no array at all")
    np.save(root / "f.npy", np.asfortranarray(np.ones((4, 3), np.float32)))
    np.save(root / "big.npy", np.ones((4, 3), ">f4"))
    np.save(root / "dtype.npy", np.ones((4, 3)))
    np.save(root / "shape.npy", np.ones((4, 4), np.float32))
    for name in ("text", "f", "big", "dtype", "shape"):
        with pytest.raises(FileFormat, match=name):
            read(files, root / f"{name}.npy")
        with pytest.raises(OutputMismatch, match=name):
            files.write_rows(f"{root}/{name}.npy", 0, np.ones((1, 3), np.float32), SPEC)


def test_ranges_and_buffers(root: Path, files: RowFiles) -> None:
    path = str(root / "a.npy")
    saved(root / "a.npy")
    with pytest.raises(FileFormat, match="10 rows"):
        read(files, path, 9, 11)
    with pytest.raises(FileFormat, match="10 rows"):
        files.read_rows(path, -1, 1, np.empty((2, 3), np.float32), SPEC)
    with pytest.raises(FileFormat, match="the batch takes"):
        files.read_rows(path, 0, 2, np.empty((2, 3)), SPEC)
    with pytest.raises(OutputMismatch, match="10 rows"):
        files.write_rows(path, 9, np.ones((2, 3), np.float32), SPEC)
    with pytest.raises(OutputMismatch, match="came as"):
        files.write_rows(path, 0, np.ones((2, 3)), SPEC)


@pytest.mark.parametrize("cached", [True, False])
def test_shrunken_files(root: Path, files: RowFiles, cached: bool) -> None:
    saved(root / "a.npy")
    if cached:
        read(files, root / "a.npy")
        files.write_rows(str(root / "a.npy"), 0, np.ones((1, 3), np.float32), SPEC)
    os.truncate(root / "a.npy", 140)
    with pytest.raises(FileChanged, match="140 bytes"):
        read(files, root / "a.npy")
    with pytest.raises(FileChanged, match="140 bytes"):
        files.write_rows(str(root / "a.npy"), 0, np.ones((1, 3), np.float32), SPEC)


def test_a_replaced_file_is_opened_again(root: Path, files: RowFiles, tmp_path: Path) -> None:
    array = saved(root / "a.npy")
    read(files, root / "a.npy")
    np.save(root / "new.npy", array + 100)
    os.replace(root / "new.npy", root / "a.npy")
    np.testing.assert_array_equal(read(files, root / "a.npy"), array[:2] + 100)
    np.save(tmp_path / "out.npy", array)
    os.unlink(root / "a.npy")
    (root / "a.npy").symlink_to(tmp_path / "out.npy")
    with pytest.raises(PathNotAllowed):
        read(files, root / "a.npy")
    os.unlink(root / "a.npy")
    with pytest.raises(FileMissing):
        read(files, root / "a.npy")


def test_a_full_disk_is_output_failed(
    root: Path, files: RowFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(root / "a.npy")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputFailed, match="No space left"):
        files.write_rows(str(root / "a.npy"), 0, np.ones((1, 3), np.float32), SPEC)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_are_bounded_and_closed_under_threads(root: Path) -> None:
    before = open_files()
    files = RowFiles([root], limit=3)
    arrays = {}
    for index in range(8):
        path = root / f"{index}.npy"
        arrays[path] = saved(path) + index
        np.save(path, arrays[path])
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(150):
                path = root / f"{random.integers(8)}.npy"
                start = int(random.integers(9))
                np.testing.assert_array_equal(
                    read(files, path, start, start + 1), arrays[path][start : start + 1]
                )
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert open_files() <= before + 3
    files.close()
    assert open_files() == before
