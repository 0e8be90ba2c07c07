"""Where a bulk job's rows come from: .npy files, checked before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from producer.bulk.sinks import file_names
from producer.errors import (
    BulkError,
    FileChanged,
    FileFormat,
    FileMissing,
    NoRows,
    WrongInputName,
)
from producer.npy import read_npy_header
from producer.spec import ModelSpec

COLUMN_FORMATS = (".parquet", ".arrow", ".feather")


class Source(NamedTuple):
    """Input files by name, and what the files the user named looked like at the start."""

    paths: dict[str, Path]
    rows: int
    identity: list[dict[str, Any]]

    def check_unchanged(self) -> None:
        """Raises FileChanged if an input was replaced or written to since the start."""
        for was in self.identity:
            if identify(Path(was["path"])) != was:
                raise FileChanged(
                    f"{was['path']!r} changed while the job ran, so the results may mix old and "
                    "new rows; run the job again with overwrite"
                )


def check_rows_fixed(spec: ModelSpec) -> None:
    """Raises BulkError for a model whose rows have no fixed size."""
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        for tensor in tensors:
            if None in tensor.shape:
                raise BulkError(
                    f"model {spec.name!r}: {kind} {tensor.name!r} has rows of shape "
                    f"{list(tensor.shape)}; bulk jobs need fixed shapes (None is dynamic), use "
                    "Client.map instead"
                )


def input_files(spec: ModelSpec, path: Path) -> dict[str, Path]:
    """Input name -> the file the user means. Raises FileMissing, WrongInputName."""
    if not path.exists():
        raise FileMissing(f"input {str(path)!r} does not exist")
    names = file_names(spec.inputs)
    if path.is_dir():
        found = {name: path / file for name, file in names.items()}
        for name, file in found.items():
            if not file.exists():
                raise FileMissing(
                    f"folder {str(path)!r} has no {file.name!r} for input {name!r} of model "
                    f"{spec.name!r}"
                )
        return found
    if len(names) > 1:
        raise WrongInputName(
            f"model {spec.name!r} has {len(names)} inputs: give a folder with "
            f"{', '.join(names.values())} instead of {str(path)!r}"
        )
    return {spec.inputs[0].name: path}


def open_npy(spec: ModelSpec, files: dict[str, Path]) -> Source:
    """The files as a source. Raises FileMissing, FileFormat, NoRows."""
    rows: int | None = None
    identity = []
    for tensor in spec.inputs:
        path = files[tensor.name]
        identity.append(identify(path))
        header = read_npy_header(path)
        if not header.matches(tensor):
            raise FileFormat(
                f"{str(path)!r} has rows of {header.dtype.name}{list(header.row_shape)}; model "
                f"{spec.name!r} takes {tensor.dtype}{list(tensor.shape)} as {tensor.name!r}"
            )
        if rows is not None and header.rows != rows:
            raise FileFormat(
                f"{str(path)!r} has {header.rows} rows where the other inputs have {rows}"
            )
        rows = header.rows
    if not rows:
        raise NoRows(f"the input {', '.join(str(path) for path in files.values())} has no rows")
    return Source(dict(files), rows, identity)


def identify(path: Path) -> dict[str, Any]:
    """What tells a file from a changed one."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise FileMissing(f"{str(path)!r} cannot be read: {error.strerror}") from error
    return {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
    }
