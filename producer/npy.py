"""The .npy format, read and written without trusting the file: headers only, never pickle."""

from __future__ import annotations

import errno
import io
import math
import os
import secrets
import stat
import tokenize
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from producer.errors import FileFormat, FileMissing, OutputFailed, OutputMismatch
from producer.spec import DTYPES, TensorSpec

#: A header of plain numbers is 128 bytes; this is also numpy's own limit for untrusted files.
MAX_HEADER_BYTES = 10_000
_MAX_SIZE = 2**62
_FILL_BYTES = 4 << 20

# All that numpy's parser was seen to raise on garbage.
_PARSER_ERRORS = (
    ValueError,
    TypeError,
    SyntaxError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    tokenize.TokenError,
)


class NpyHeader(NamedTuple):
    """What a .npy file holds: `shape` includes the leading axis of rows; offsets in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    data_offset: int

    @property
    def rows(self) -> int:
        """Length of the leading axis."""
        return self.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @property
    def file_bytes(self) -> int:
        """The least size of a file that holds all rows."""
        return self.data_offset + self.rows * self.row_bytes

    def matches(self, spec: TensorSpec) -> bool:
        """True if dtype and row shape are those of `spec`; a None of the spec takes any size."""
        return (
            self.dtype == np.dtype(spec.dtype)
            and len(self.row_shape) == len(spec.shape)
            and all(
                want is None or want == size
                for want, size in zip(spec.shape, self.row_shape, strict=True)
            )
        )


def open_regular(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `path`, never following a symlink in its last part.

    Raises FileMissing if it is not there, is no regular file or may not be opened.
    """
    try:
        # Asked before opening: opening a device may already do something. O_NONBLOCK: a pipe
        # that takes the place in between must not block.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise FileMissing(f"{path!r} is not a regular file")
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise FileMissing(f"{path!r} cannot be opened: {reason(error)}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileMissing(f"{path!r} is not a regular file")
    return fd


def read_header(fd: int, path: str) -> NpyHeader:
    """The header of the open .npy file `fd`; `path` is for messages. Its size is not checked.

    Raises FileFormat for anything but a C-ordered, little-endian array of a dtype that may
    travel and at least one axis; FileMissing if it cannot be read.
    """
    try:
        start = os.pread(fd, MAX_HEADER_BYTES + 64, 0)
    except OSError as error:
        raise FileMissing(f"{path!r} cannot be read: {reason(error)}") from error
    return parse_header(start, path)


def parse_header(start: bytes, path: str) -> NpyHeader:
    """The header in a file's first bytes. Raises FileFormat as `read_header` does."""
    dtype, shape, fortran, data_offset = _parse(start, path)
    if dtype.str[0] not in "<|":
        raise FileFormat(f"{path!r} is big-endian; save it again with array.astype({dtype.name!r})")
    if not shape:
        raise FileFormat(f"{path!r} holds a single number; it needs a leading axis of rows")
    if fortran and len(shape) > 1:
        raise FileFormat(
            f"{path!r} is in Fortran order, so its rows do not lie together; save it again with "
            "numpy.ascontiguousarray"
        )
    header = NpyHeader(dtype, shape, data_offset)
    if header.file_bytes >= _MAX_SIZE:
        raise FileFormat(f"{path!r} is no .npy file: its shape {header.shape} is out of range")
    return header


def read_array(content: bytes, path: str) -> npt.NDArray[Any]:
    """The array of a whole .npy file in memory, read-only, over the bytes of `content`.

    Any byte order and axis order. Raises FileFormat for what is no .npy of plain numbers, or is
    shorter than its header says; nothing of the size that the header promises is allocated.
    """
    dtype, shape, fortran, data_offset = _parse(content[: MAX_HEADER_BYTES + 64], path)
    count = math.prod(shape)
    wanted_bytes = count * dtype.itemsize
    if wanted_bytes > len(content) - data_offset:
        raise FileFormat(
            f"{path!r} is cut off: its header promises {wanted_bytes} bytes of data, it has "
            f"{len(content) - data_offset}"
        )
    try:
        flat = np.frombuffer(content, dtype, count, data_offset)
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        # More axes than numpy has, or no elements and yet a size beyond what can be addressed.
        raise FileFormat(f"{path!r} is no .npy file: {str(error)[:200]}") from error


def _parse(start: bytes, path: str) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """(dtype, shape, Fortran order?, offset of the data); raises FileFormat."""
    stream = io.BytesIO(start)
    try:
        version = npy_format.read_magic(stream)
        if version == (1, 0):
            read = npy_format.read_array_header_1_0
        elif version == (2, 0):
            read = npy_format.read_array_header_2_0
        else:
            raise FileFormat(
                f"{path!r} is a .npy of version {version[0]}.{version[1]}; only 1.0 and 2.0 hold "
                "plain numbers"
            )
        shape, fortran, dtype = read(stream, max_header_size=MAX_HEADER_BYTES)
    except _PARSER_ERRORS as error:
        raise FileFormat(f"{path!r} is no .npy file: {str(error)[:200]}") from error
    dtype = np.dtype(dtype)
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise FileFormat(f"{path!r} holds objects or structures; save plain numbers")
    if dtype.name not in DTYPES:
        raise FileFormat(f"{path!r} holds dtype {dtype.name}, which cannot be used")
    if any(type(size) is not int or not 0 <= size < _MAX_SIZE for size in shape):
        raise FileFormat(f"{path!r} is no .npy file: a dimension is out of range")
    return dtype, tuple(shape), fortran, stream.tell()


def read_npy_header(path: str | os.PathLike[str]) -> NpyHeader:
    """The header of a .npy file whose data is all there; symlinks are followed.

    Raises FileMissing, FileFormat (also when the file is shorter than its header says).
    """
    name = os.fspath(path)
    fd = open_regular(os.path.realpath(name))
    try:
        header = read_header(fd, name)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if size < header.file_bytes:
        raise FileFormat(
            f"{name!r} is cut off: its header promises {header.file_bytes} bytes, it has {size}"
        )
    return header


def create_npy(
    path: str | os.PathLike[str],
    dtype: npt.DTypeLike,
    shape: Sequence[int],
    fill: float = 0,
    *,
    overwrite: bool = False,
) -> NpyHeader:
    """Creates a .npy of full size whose every value is `fill`; sparse when that is 0.

    The file appears under its name complete or not at all. Raises OutputMismatch if it exists
    and `overwrite` is False, OutputFailed if it cannot be created.
    """
    name = os.fspath(path)
    if not overwrite and os.path.lexists(name):
        raise OutputMismatch(f"{name!r} exists")
    stream = io.BytesIO()
    wanted = np.dtype(dtype)
    full_shape = tuple(int(size) for size in shape)
    described: dict[str, Any] = {
        "descr": npy_format.dtype_to_descr(wanted),
        "fortran_order": False,
        "shape": full_shape,
    }
    npy_format.write_array_header_1_0(stream, described)
    header = NpyHeader(wanted, full_shape, stream.tell())
    folder, base = os.path.split(name)
    temporary = os.path.join(folder, f".{base[:200]}.{secrets.token_hex(6)}.tmp")
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, stream.getvalue(), 0)
            os.ftruncate(fd, header.file_bytes)
            if fill != 0:
                fill_rows(fd, header, 0, header.rows, fill)
        finally:
            os.close(fd)
        os.replace(temporary, name)
    except (OSError, OverflowError) as error:
        _remove(temporary)
        raise OutputFailed(
            f"{name!r} of {header.file_bytes} bytes cannot be created: {reason(error)}"
        ) from error
    except BaseException:
        _remove(temporary)
        raise
    return header


def fill_rows(fd: int, header: NpyHeader, start: int, stop: int, value: float) -> None:
    """Sets rows `start` to `stop` of an open .npy to one value; raises OSError."""
    per_write = max(1, _FILL_BYTES // max(1, header.row_bytes))
    block = np.full((min(per_write, stop - start), *header.row_shape), value, header.dtype)
    for first in range(start, stop, per_write):
        rows = min(per_write, stop - first)
        write_all(fd, bytes_of(block[:rows]), header.data_offset + first * header.row_bytes)


def write_all(fd: int, data: Any, offset: int) -> None:
    """Writes a whole bytes-like object at `offset`; raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        view = view[written:]
        offset += written


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, without a copy."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def reason(error: Exception) -> str:
    """An operating system error without its number and path."""
    return getattr(error, "strerror", None) or str(error)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
