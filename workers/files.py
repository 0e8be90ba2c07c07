"""Rows of .npy files for the slots: read into their buffers, written from their outputs.

Plain reads and writes at an offset instead of a memory map: a file that shrinks under a map kills
the process with SIGBUS; here it is an error of one task.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from producer.errors import (
    FileChanged,
    FileFormat,
    FileMissing,
    OutputFailed,
    OutputMismatch,
    PathNotAllowed,
)
from producer.npy import NpyHeader, bytes_of, read_header, reason, write_all
from producer.spec import TensorSpec
from workers.beneath import open_beneath
from workers.engines.base import Array


class _OpenFile:
    """A descriptor shared by the threads that use it now; closed by the last one once evicted."""

    __slots__ = ("device", "evicted", "fd", "header", "inode", "mtime_ns", "users")

    def __init__(self, fd: int, header: NpyHeader, status: os.stat_result) -> None:
        self.fd = fd
        self.header = header
        self.device = status.st_dev
        self.inode = status.st_ino
        self.mtime_ns = status.st_mtime_ns
        self.users = 0
        self.evicted = False


class RowFiles:
    """Open .npy files inside allow-listed folders, at most `limit` kept open. Thread-safe."""

    def __init__(self, roots: Sequence[Path], *, limit: int = 64) -> None:
        self._roots = tuple(roots)
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[str, bool], _OpenFile] = OrderedDict()

    def read_rows(self, path: str, start: int, stop: int, into: Array, spec: TensorSpec) -> None:
        """Reads rows `start` to `stop` of `path` into `into`, shape (stop - start, *row shape).

        `into` is C-contiguous and of the spec's dtype. Raises PathNotAllowed, FileMissing,
        FileFormat (dtype or row shape is not the spec's, rows out of range) and FileChanged (the
        file is shorter than its header says).
        """
        with self._opened(path, writable=False) as (opened, size):
            header = opened.header
            if not header.matches(spec):
                raise FileFormat(f"{path!r} holds {_has(header)}; {_wants(spec)}")
            if not 0 <= start <= stop <= header.rows:
                raise FileFormat(f"{path!r} has {header.rows} rows, not rows {start} to {stop}")
            if into.shape != (stop - start, *header.row_shape) or into.dtype != header.dtype:
                raise FileFormat(
                    f"{path!r} holds {_has(header)}; the batch takes rows of "
                    f"{into.dtype.name}{list(into.shape[1:])}"
                )
            if size < header.file_bytes:
                raise FileChanged(
                    f"{path!r} has {size} bytes where its header promises {header.file_bytes}: it "
                    "was cut off"
                )
            if not into.flags.c_contiguous:
                raise ValueError("rows are read into C-contiguous memory only")
            view = bytes_of(into)
            offset = header.data_offset + start * header.row_bytes
            while view:
                try:
                    count = os.preadv(opened.fd, [view], offset)
                except OSError as error:
                    raise FileMissing(f"{path!r} cannot be read: {reason(error)}") from error
                if count == 0:
                    raise FileChanged(f"{path!r} was cut off while rows were read")
                view = view[count:]
                offset += count

    def write_rows(self, path: str, start: int, array: Array, spec: TensorSpec) -> None:
        """Writes `array`, shape (rows, *row shape), to `path` from row `start` on.

        The file must exist. Raises PathNotAllowed, FileMissing, OutputMismatch (it is no .npy of
        the spec's dtype and row shape, or the rows are out of range), FileChanged (it was cut
        off) and OutputFailed (disk full, input/output error).
        """
        with self._opened(path, writable=True) as (opened, size):
            header = opened.header
            if not header.matches(spec):
                raise OutputMismatch(f"{path!r} holds {_has(header)}; {_wants(spec)}")
            if array.dtype != header.dtype or array.shape[1:] != header.row_shape:
                raise OutputMismatch(
                    f"{path!r} holds {_has(header)}; output {spec.name!r} came as "
                    f"{array.dtype.name}{list(array.shape[1:])}"
                )
            if not 0 <= start <= start + len(array) <= header.rows:
                raise OutputMismatch(
                    f"{path!r} has {header.rows} rows, not rows {start} to {start + len(array)}"
                )
            if size < header.file_bytes:
                raise FileChanged(
                    f"{path!r} has {size} bytes where its header promises {header.file_bytes}: it "
                    "was cut off"
                )
            try:
                write_all(
                    opened.fd,
                    bytes_of(np.ascontiguousarray(array)),
                    header.data_offset + start * header.row_bytes,
                )
            except OSError as error:
                raise OutputFailed(
                    f"rows {start} to {start + len(array)} of {path!r} cannot be written: "
                    f"{reason(error)}"
                ) from error

    def close(self) -> None:
        """Closes all files; one that is being used is closed when its user is done."""
        with self._lock:
            for key in list(self._files):
                self._evict(key)

    @contextmanager
    def _opened(self, path: str, *, writable: bool) -> Iterator[tuple[_OpenFile, int]]:
        opened, size = self._take(path, writable)
        try:
            yield opened, size
        finally:
            with self._lock:
                opened.users -= 1
                if opened.evicted and not opened.users:
                    os.close(opened.fd)

    def _take(self, path: str, writable: bool) -> tuple[_OpenFile, int]:
        """The file, counted as used, and its size now."""
        key = (path, writable)
        with self._lock:
            opened = self._files.get(key)
            if opened is not None:
                opened.users += 1
                self._files.move_to_end(key)
        if opened is not None:
            status = self._still(path, opened, writable)
            if status is not None:
                return opened, status.st_size
            with self._lock:
                opened.users -= 1
                if self._files.get(key) is opened:
                    self._evict(key)
                elif opened.evicted and not opened.users:
                    os.close(opened.fd)
        fresh = self._open(path, writable)
        size = os.fstat(fresh.fd).st_size
        with self._lock:
            if key in self._files:
                self._evict(key)
            while len(self._files) >= self._limit:
                self._evict(next(iter(self._files)))
            fresh.users = 1
            self._files[key] = fresh
        return fresh, size

    def _still(self, path: str, opened: _OpenFile, writable: bool) -> os.stat_result | None:
        """The file's status if the path still names it, and nobody rewrote an input."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        same = (status.st_dev, status.st_ino) == (opened.device, opened.inode)
        if not same or (not writable and status.st_mtime_ns != opened.mtime_ns):
            return None
        return status

    def _evict(self, key: tuple[str, bool]) -> None:
        opened = self._files.pop(key)
        opened.evicted = True
        if not opened.users:
            os.close(opened.fd)

    def _open(self, path: str, writable: bool) -> _OpenFile:
        root, parts = self._allowed(path)
        fd = open_beneath(root, parts, os.O_RDWR if writable else os.O_RDONLY, path)
        try:
            try:
                header = read_header(fd, path)
            except FileFormat as error:
                if writable:
                    raise OutputMismatch(error.message) from error
                raise
            return _OpenFile(fd, header, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise

    def _allowed(self, path: str) -> tuple[str, tuple[str, ...]]:
        """The root that `path` lies in and its parts below it, all without symlinks."""
        try:
            real = Path(os.path.realpath(path))
        except (OSError, ValueError) as error:
            raise PathNotAllowed(f"{path!r} is no usable path: {reason(error)}") from error
        if not os.path.isabs(path):
            raise PathNotAllowed(f"{path!r} is relative; a worker takes absolute paths only")
        for root in map(os.path.realpath, self._roots):
            if real.is_relative_to(root):
                return root, real.relative_to(root).parts
        raise PathNotAllowed(
            f"{path!r} is not inside the folders that this worker may use; its operator "
            "allows folders with TRTQ_BULK_ROOTS"
        )


def _has(header: NpyHeader) -> str:
    return f"rows of {header.dtype.name}{list(header.row_shape)}"


def _wants(spec: TensorSpec) -> str:
    return f"the model's {spec.name!r} has rows of {spec.dtype}{list(spec.shape)}"
