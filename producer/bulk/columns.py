"""Parquet and Arrow files as .npy, in bounded pieces. Needs the extra `bulk` (pyarrow)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from producer.errors import FileFormat, FileMissing, MissingExtra, OutputFailed
from producer.npy import bytes_of, create_npy, open_regular, reason, write_all
from producer.quote import quoted
from producer.spec import ModelSpec

_BATCH_BYTES = 16 << 20


def convert(spec: ModelSpec, path: Path, target: Path) -> None:
    """Writes the rows of a column file to `target`, a .npy for the model's only input.

    A column with the input's name, or the only column, holds one list per row, of the flattened
    row's length. Otherwise all columns, in their order, are the elements of the flattened row.
    Either way the type is exactly the input's dtype and nothing is null.

    Raises MissingExtra, FileMissing, FileFormat, OutputFailed.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"{str(path)!r} needs pyarrow: pip install 'trtq[bulk]', or give a .npy file"
        ) from error
    tensor = spec.inputs[0]
    row_shape = tuple(size for size in tensor.shape if size is not None)
    dtype = np.dtype(tensor.dtype)
    width = math.prod(row_shape)
    per_batch = max(1, _BATCH_BYTES // max(1, width * dtype.itemsize))
    name = str(path)
    with _read_errors(name):
        rows = _rows(path)
    try:
        header = create_npy(target, dtype, (rows, *row_shape), overwrite=True)
        fd = open_regular(str(target), os.O_RDWR)
        try:
            at = 0
            batches = _batches(path, per_batch)
            while True:
                with _read_errors(name):
                    batch = next(batches, None)
                    if batch is None:
                        break
                    block = _block(batch, tensor.name, dtype, width, name)
                if at + len(block) > rows:
                    raise FileFormat(f"{name!r} holds more than the {rows} rows that it says")
                write_all(fd, bytes_of(block), header.data_offset + at * header.row_bytes)
                at += len(block)
        finally:
            os.close(fd)
    except OSError as error:
        raise OutputFailed(f"converting {name!r}: {reason(error)}") from error
    if at < rows:
        raise FileFormat(f"{name!r} says that it holds {rows} rows, it has {at}")


@contextmanager
def _read_errors(path: str) -> Iterator[None]:
    """What pyarrow raises on a file, as FileFormat; FileMissing where the system refused it."""
    import pyarrow

    try:
        yield
    except OSError as error:
        if error.errno:
            raise FileMissing(f"{path!r} cannot be read: {reason(error)}") from error
        # pyarrow's own: it reports damage as input/output errors without a number.
        raise FileFormat(f"{path!r} cannot be read: {str(error)[:300]}") from error
    except (pyarrow.ArrowException, ValueError, LookupError, MemoryError) as error:
        raise FileFormat(f"{path!r} cannot be read: {str(error)[:300]}") from error


def _rows(path: Path) -> int:
    import pyarrow

    if path.suffix == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with pyarrow.OSFile(str(path)) as raw, pyarrow.ipc.open_file(raw) as file:
        batches = range(file.num_record_batches)
        return sum(file.get_batch(index).num_rows for index in batches)


def _batches(path: Path, rows: int) -> Iterator[Any]:
    import pyarrow

    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=rows)
        return
    with pyarrow.OSFile(str(path)) as raw, pyarrow.ipc.open_file(raw) as file:
        for index in range(file.num_record_batches):
            batch = file.get_batch(index)
            # Offsets and lengths are as the file has them, and used without another check.
            batch.validate(full=True)
            yield batch


def _block(batch: Any, name: str, dtype: np.dtype[Any], width: int, path: str) -> Any:
    """(rows, width) of the batch."""
    import pyarrow

    wanted = pyarrow.from_numpy_dtype(dtype)
    names = batch.schema.names
    if names.count(name) > 1:
        raise FileFormat(f"{path!r} has {names.count(name)} columns named {name!r}")
    # By place: pyarrow finds no column by a name that occurs twice.
    place = names.index(name) if name in names else 0
    if name in names or (len(names) == 1 and _is_list(batch.column(place).type)):
        column = batch.column(place)
        if _is_list(column.type):
            flat = column.flatten()
            even = pyarrow.types.is_fixed_size_list(column.type) or all(
                size == width for size in column.value_lengths().to_pylist()
            )
            if column.null_count or not even or len(flat) != len(column) * width:
                raise FileFormat(f"{path!r}: a row of column {name!r} has not {width} elements")
            return _numbers(flat, wanted, name, path).reshape(len(column), width)
        columns = [(name, column)]
    else:
        columns = list(zip(names, batch.columns, strict=True))
    if len(columns) != width:
        raise FileFormat(
            f"{path!r} has {len(columns)} columns where a row of input {name!r} has {width} "
            f"elements; give a list column named {name!r} or one column per element"
        )
    return np.stack([_numbers(c, wanted, key, path) for key, c in columns], axis=1)


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_fixed_size_list(kind)
        or pyarrow.types.is_list(kind)
        or pyarrow.types.is_large_list(kind)
    )


def _numbers(column: Any, wanted: Any, name: str, path: str) -> Any:
    if column.type != wanted:
        raise FileFormat(
            f"{path!r}: column {quoted(name)} is of {str(column.type)[:200]}, the model takes "
            f"{wanted}"
        )
    if column.null_count:
        raise FileFormat(f"{path!r}: column {quoted(name)} holds nulls")
    return column.to_numpy(zero_copy_only=False)
