"""Arrays from and to files: .npy, .npz and JSON."""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy_format

from producer.errors import FileFormat, FileMissing, InvalidInput, OutputFailed
from producer.inputs import to_arrays
from producer.npy import read_array, reason
from producer.quote import quoted
from producer.task import Tensor

_MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"
_MAX_UNPACKED_BYTES = 256 << 20

# All that zipfile and zlib were seen to raise on garbage.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


def read_inputs(source: str, stdin: BinaryIO) -> Any:
    """What `source` ("-" is stdin) holds: an array, a dict of arrays by name, or JSON's lists.

    The content says what it is, not the name. Raises FileMissing, FileFormat.
    """
    where = "stdin" if source == "-" else source
    if source == "-":
        content = stdin.read()
    else:
        try:
            content = Path(source).read_bytes()
        except (OSError, ValueError) as failure:
            raise FileMissing(f"{where!r} cannot be read: {reason(failure)}") from None
    if content.startswith(_NPY):
        return read_array(content, where)
    if content.startswith(_ZIP):
        return _archive(content, where)
    return _json(content, where)


def _archive(content: bytes, where: str) -> dict[str, Any]:
    """The arrays of a .npz by name; raises FileFormat."""
    found: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            total_bytes = sum(member.file_size for member in members)
            if total_bytes > _MAX_UNPACKED_BYTES:
                raise FileFormat(
                    f"{where!r} holds {total_bytes} bytes when unpacked; at most "
                    f"{_MAX_UNPACKED_BYTES} fit into a task: use a bulk job"
                )
            for member in members:
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise FileFormat(
                        f"{where!r}: {quoted(member.filename)} is compressed otherwise than by "
                        "deflate"
                    )
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as file:
                    # No more than it promised: the archive's list of members may lie.
                    data = file.read(member.file_size)
                found[name] = read_array(data, f"{member.filename[:200]} of {where}")
    except _ZIP_ERRORS as failure:
        raise FileFormat(f"{where!r} is no readable .npz: {str(failure)[:300]}") from None
    return found


def _json(content: bytes, where: str) -> Any:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as failure:
        raise FileFormat(
            f"{where!r} is neither .npy, .npz nor JSON: {str(failure)[:300]}"
        ) from None
    if value is None or isinstance(value, str):
        raise FileFormat(
            f"{where!r} holds {quoted(value)}; give numbers, lists, or an object of lists"
        )
    return value


def check_output(path: Path) -> None:
    """Raises InvalidInput if `write_outputs` could not write there."""
    if path.suffix not in (".npy", ".npz"):
        raise InvalidInput(f"--output {str(path)!r}: use a name that ends in .npy or .npz")
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"--output {str(path)!r}: the folder does not exist")


def write_outputs(path: Path, named: Mapping[str, Any]) -> None:
    """Outputs by name: one as .npy or .npz, several as .npz; InvalidInput for several as .npy."""
    if path.suffix == ".npz":
        # Not numpy.savez: it takes no array of the name of one of its own arguments.
        with zipfile.ZipFile(path, "w") as archive:
            for name, array in named.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    npy_format.write_array(file, np.asarray(array), allow_pickle=False)
    elif len(named) == 1:
        np.save(path, next(iter(named.values())))
    else:
        raise InvalidInput(
            f"--output {str(path)!r}: the model has outputs {sorted(named)}, use a .npz"
        )


def write_tensors(path: Path, tensors: tuple[Tensor, ...]) -> None:
    """A task's inputs as .npz, by name. Raises InvalidInput, OutputFailed."""
    for tensor in tensors:
        # Names came from a client; those of an archive's members are paths to whoever unpacks it.
        if not _MEMBER.fullmatch(tensor.name):
            raise InvalidInput(f"--output: input name {tensor.name[:100]!a} is not fit for a file")
    try:
        with zipfile.ZipFile(path, "w") as archive:
            for tensor in tensors:
                with archive.open(f"{tensor.name}.npy", "w", force_zip64=True) as member:
                    array = to_arrays((tensor,), single=False)
                    np.lib.format.write_array(member, array, allow_pickle=False)
    except OSError as failure:
        raise OutputFailed(f"{str(path)!r} cannot be written: {failure.strerror}") from None


def to_json(outputs: Any) -> str:
    """Nested lists, in an object by name where there are several outputs."""
    if isinstance(outputs, dict):
        return json.dumps({name: np.asarray(array).tolist() for name, array in outputs.items()})
    return json.dumps(np.asarray(outputs).tolist())
