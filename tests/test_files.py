import errno
import os
import socket
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


def write(files: RowFiles, path: Path | str) -> None:
    files.write_rows(str(path), 0, np.full((1, 3), 7, np.float32), SPEC)


def swap_for_symlink(path: Path, target: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(target)


@pytest.mark.parametrize("use", [read, write])
@pytest.mark.parametrize("swapped", ["folder", "folder/inner", "folder/inner/a.npy"])
def test_a_symlink_that_comes_after_the_check_is_not_followed(
    root: Path,
    tmp_path: Path,
    files: RowFiles,
    monkeypatch: pytest.MonkeyPatch,
    swapped: str,
    use: Any,
) -> None:
    inside, outside = root / "folder" / "inner", tmp_path / "folder" / "inner"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        saved(folder / "a.npy")
    before = (outside / "a.npy").read_bytes()
    check = files._allowed

    def swap_after_check(path: str) -> Any:
        checked = check(path)
        swap_for_symlink(root / swapped, tmp_path / swapped)
        return checked

    monkeypatch.setattr(files, "_allowed", swap_after_check)
    with pytest.raises((PathNotAllowed, FileMissing)):
        use(files, inside / "a.npy")
    assert (outside / "a.npy").read_bytes() == before


@pytest.mark.parametrize("kind", ["symlink", "pipe"])
def test_what_comes_between_the_last_look_and_the_opening(
    root: Path, tmp_path: Path, files: RowFiles, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    saved(root / "a.npy")
    saved(tmp_path / "a.npy")
    look = os.stat

    def swap_after_look(*arguments: Any, **options: Any) -> Any:
        found = look(*arguments, **options)
        if "dir_fd" in options and arguments[0] == "a.npy" and not (root / "moved").exists():
            if kind == "symlink":
                swap_for_symlink(root / "a.npy", tmp_path / "a.npy")
            else:
                (root / "a.npy").rename(root / "moved")
                os.mkfifo(root / "a.npy")
        return found

    monkeypatch.setattr(os, "stat", swap_after_look)
    with pytest.raises(PathNotAllowed if kind == "symlink" else FileMissing):
        read(files, root / "a.npy")


def test_a_folder_that_flips_all_the_time_never_leads_outside(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for folder, value in ((root / "real", 1), (outside, 666)):
        folder.mkdir()
        np.save(folder / "a.npy", np.full((4, 3), value, np.float32))
    (root / "link").symlink_to(outside)
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            for name in ("real", "link"):
                os.rename(root / name, root / "flip")
                os.rename(root / "flip", root / name)

    thread = threading.Thread(target=flip)
    thread.start()
    seen = set()
    try:
        for _ in range(500):
            files = RowFiles([root])
            try:
                seen.add(float(read(files, root / "flip" / "a.npy")[0, 0]))
            except (PathNotAllowed, FileMissing) as refused:
                seen.add(type(refused).__name__)
            finally:
                files.close()
    finally:
        stop.set()
        thread.join(10)
    assert 666.0 not in seen
    assert len(seen) > 1


def test_devices_and_sockets_are_no_files(root: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "socket"))
        with pytest.raises(FileMissing, match="regular"):
            read(RowFiles([root]), root / "socket")
    for device in ("/dev/zero", "/dev/null", "/dev/tty"):
        with pytest.raises(FileMissing):
            read(RowFiles([Path("/dev")]), device)
        with pytest.raises(FileMissing):
            write(RowFiles([Path("/dev")]), device)


def test_paths_beyond_the_limits_of_the_system(root: Path, files: RowFiles) -> None:
    for path in (f"{root}/{'a/' * 3000}b.npy", f"{root}/{'b' * 5000}", f"{root}/{'../' * 3000}etc"):
        with pytest.raises((PathNotAllowed, FileMissing)):
            read(files, path)
        with pytest.raises((PathNotAllowed, FileMissing)):
            write(files, path)


def test_no_descriptor_is_left_after_refusals(root: Path, files: RowFiles) -> None:
    (root / "folder").mkdir()
    (root / "text.npy").write_text("no array")
    before = open_files()
    for name in ("none.npy", "folder", "text.npy", "folder/none.npy", "text.npy/a.npy", "."):
        with pytest.raises((FileMissing, FileFormat)):
            read(files, root / name)
    assert open_files() == before


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
