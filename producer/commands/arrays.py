"""Arrays from and to files: .npy, .npz and JSON."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from producer.errors import FileFormat, FileMissing, InvalidInput, OutputFailed
from producer.inputs import to_arrays
from producer.task import Tensor

_MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")
_NPY, _ZIP = b"\x93NUMPY", b"PK\x03\x04"


def read_inputs(source: str, stdin: BinaryIO) -> Any:
    """What `source` ("-" is stdin) holds: an array, a dict of arrays by name, or JSON's lists.

    The content says what it is, not the name. Raises FileMissing, FileFormat.
    """
    where = "stdin" if source == "-" else repr(source)
    if source == "-":
        content = stdin.read()
    else:
        try:
            content = Path(source).read_bytes()
        except OSError as failure:
            raise FileMissing(f"{where} cannot be read: {failure.strerror}") from None
    try:
        if content.startswith(_NPY):
            return np.load(io.BytesIO(content), allow_pickle=False)
        if content.startswith(_ZIP):
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as failure:
        raise FileFormat(f"{where} is no readable .npy or .npz: {failure}") from None
    return _json(content, where)


def _json(content: bytes, where: str) -> Any:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as failure:
        raise FileFormat(f"{where} is neither .npy, .npz nor JSON: {failure}") from None
    if value is None or isinstance(value, str):
        raise FileFormat(f"{where} holds {value!r}; give numbers, lists, or an object of lists")
    return value


def check_output(path: Path) -> None:
    """Raises InvalidInput if `write_outputs` could not write there."""
    if path.suffix not in (".npy", ".npz"):
        raise InvalidInput(f"--output {str(path)!r}: use a name that ends in .npy or .npz")
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"--output {str(path)!r}: the folder does not exist")


def write_outputs(path: Path, outputs: Any) -> None:
    """One array as .npy or .npz, several as .npz; raises InvalidInput for several as .npy."""
    named = outputs if isinstance(outputs, dict) else {"output": outputs}
    if path.suffix == ".npz":
        np.savez(path, **named)
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
