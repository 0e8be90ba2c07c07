"""Where a bulk job's rows go: .npy files that the workers fill, and a list of errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import numpy as np

from producer.errors import BulkError, FileMissing, OutputFailed, OutputMismatch, TrtqError
from producer.npy import (
    NpyHeader,
    create_npy,
    fill_rows,
    open_regular,
    read_npy_header,
    reason,
)
from producer.spec import ModelSpec, TensorSpec
from producer.task import RowError


def file_names(tensors: Iterable[TensorSpec]) -> dict[str, str]:
    """Tensor name -> `<name>.npy`; a slash in a name becomes an underscore."""
    names = {tensor.name: tensor.name.replace("/", "_") + ".npy" for tensor in tensors}
    if len(set(names.values())) < len(names):
        raise BulkError(f"the names {sorted(names)} cannot be told apart as file names")
    return names


class OutputFiles:
    """OUTPUT.npy of a model with one output, else a folder OUTPUT with `<output>.npy` of each."""

    def __init__(self, spec: ModelSpec, output: Path) -> None:
        self.output = output
        self.tensors = {tensor.name: tensor for tensor in spec.outputs}
        self.is_folder = len(spec.outputs) > 1
        names = file_names(spec.outputs)
        self.paths: dict[str, Path] = {
            name: output / file if self.is_folder else output for name, file in names.items()
        }
        self._open: dict[str, tuple[int, NpyHeader]] = {}

    def check_place(self) -> None:
        """Raises if the output cannot be made at that path at all."""
        if not self.output.parent.is_dir():
            raise FileMissing(f"folder {str(self.output.parent)!r} does not exist; create it first")
        if self.is_folder:
            if self.output.exists() and not self.output.is_dir():
                raise OutputMismatch(
                    f"{str(self.output)!r} is a file; the model has outputs "
                    f"{', '.join(self.paths)}, which need a folder"
                )
        elif self.output.is_dir():
            raise OutputMismatch(f"{str(self.output)!r} is a folder; name a .npy file")
        elif self.output.suffix != ".npy":
            raise BulkError(f"output {str(self.output)!r}: results are .npy, name it so")

    def existing(self) -> list[Path]:
        """Those of the files that exist."""
        return [path for path in self.paths.values() if path.exists()]

    def create(self, rows: int) -> None:
        """Creates all files, sparse, in place of old ones. Raises OutputFailed."""
        sizes = {name: (rows, *_fixed(tensor)) for name, tensor in self.tensors.items()}
        try:
            if self.is_folder:
                self.output.mkdir(exist_ok=True)
            free = shutil.disk_usage(self.output.parent).free
        except OSError as error:
            raise OutputFailed(f"{str(self.output)!r}: {reason(error)}") from error
        need = sum(
            int(np.prod(shape, dtype=object)) * np.dtype(self.tensors[name].dtype).itemsize
            for name, shape in sizes.items()
        )
        if need > free + sum(path.stat().st_size for path in self.existing()):
            raise OutputFailed(f"{str(self.output)!r} needs {need} bytes, its disk has {free} left")
        for name, tensor in self.tensors.items():
            header = create_npy(self.paths[name], tensor.dtype, sizes[name], overwrite=True)
            self._open[name] = open_regular(str(self.paths[name]), os.O_RDWR), header

    def reopen(self, rows: int) -> None:
        """Opens the files of an interrupted job; raises OutputMismatch if they are not its."""
        for name, tensor in self.tensors.items():
            path = self.paths[name]
            try:
                header = read_npy_header(path)
            except BulkError as error:
                raise OutputMismatch(error.message) from error
            if header.rows != rows or not header.matches(tensor):
                raise OutputMismatch(
                    f"{str(path)!r} has shape {list(header.shape)} of {header.dtype.name}; this "
                    f"job writes {[rows, *tensor.shape]} of {tensor.dtype}"
                )
            self._open[name] = open_regular(str(path), os.O_RDWR), header

    def mark_missing(self, start: int, stop: int) -> None:
        """Sets rows to NaN, or 0 in outputs of integers. Raises OutputFailed."""
        for name, (fd, header) in self._open.items():
            value = float("nan") if header.dtype.kind == "f" else 0
            try:
                fill_rows(fd, header, start, stop, value)
            except OSError as error:
                raise OutputFailed(f"{str(self.paths[name])!r}: {reason(error)}") from error

    def sync(self) -> None:
        """Waits until what is written is on the disk. Raises OutputFailed."""
        for name, (fd, _) in self._open.items():
            try:
                os.fsync(fd)
            except OSError as error:
                raise OutputFailed(f"{str(self.paths[name])!r}: {reason(error)}") from error

    def remove(self) -> None:
        """Deletes the files: a job that ended before it had any result."""
        for path in self.existing():
            path.unlink()

    def close(self) -> None:
        """Closes the files."""
        while self._open:
            os.close(self._open.popitem()[1][0])


class ErrorList:
    """OUTPUT.npy.errors.jsonl: one line per failed row, in the order they became known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self._file: TextIO | None = None

    def begin(self) -> None:
        """Forgets an earlier run's list: its rows are tried again. Raises OutputFailed."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise OutputFailed(f"{str(self.path)!r}: {reason(error)}") from error

    def add(self, errors: Iterable[RowError]) -> None:
        """Writes the rows down. Raises OutputFailed."""
        try:
            if self._file is None:
                self._file = self.path.open("w", encoding="utf-8")
            for error in errors:
                self._file.write(json.dumps(error._asdict()) + "\n")
                self.rows += 1
            self._file.flush()
        except OSError as error:
            raise OutputFailed(f"{str(self.path)!r}: {reason(error)}") from error

    def add_chunk(self, start: int, stop: int, error: TrtqError) -> None:
        """All rows of a chunk failed for one reason."""
        self.add(RowError(row, error.code, error.message) for row in range(start, stop))

    def close(self) -> None:
        """Closes the file; it exists only if a row failed."""
        if self._file is not None:
            self._file.close()


def _fixed(tensor: TensorSpec) -> tuple[int, ...]:
    return tuple(size for size in tensor.shape if size is not None)
