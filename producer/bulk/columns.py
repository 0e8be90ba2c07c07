"""Parquet and Arrow files as .npy, in bounded pieces. Needs the extra `bulk` (pyarrow)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from producer.errors import FileFormat, MissingExtra, OutputFailed
from producer.npy import bytes_of, create_npy, open_regular, reason, write_all
from producer.spec import ModelSpec

_BATCH_BYTES = 16 << 20


def convert(spec: ModelSpec, path: Path, target: Path) -> None:
    """Writes the rows of a column file to `target`, a .npy for the model's only input.

    A column with the input's name, or the only column, holds one list per row, of the flattened
    row's length. Otherwise all columns, in their order, are the elements of the flattened row.
    Either way the type is exactly the input's dtype and nothing is null.

    Raises MissingExtra, FileFormat, OutputFailed.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise MissingExtra(
            f"{str(path)!r} needs pyarrow: pip install 'trtq[bulk]', or give a .npy file"
        ) from error
    tensor = spec.inputs[0]
    row_shape = tuple(size for size in tensor.shape if size is not None)
    dtype = np.dtype(tensor.dtype)
    width = math.prod(row_shape)
    per_batch = max(1, _BATCH_BYTES // max(1, width * dtype.itemsize))
    try:
        rows = sum(batch.num_rows for batch in _batches(path, per_batch, columns=[]))
        header = create_npy(target, dtype, (rows, *row_shape), overwrite=True)
        fd = open_regular(str(target), os.O_RDWR)
        try:
            at = header.data_offset
            for batch in _batches(path, per_batch, columns=None):
                block = _block(batch, tensor.name, dtype, width, str(path))
                write_all(fd, bytes_of(block), at)
                at += block.nbytes
        finally:
            os.close(fd)
    except pyarrow.ArrowException as error:
        raise FileFormat(f"{str(path)!r} cannot be read: {str(error)[:300]}") from error
    except OSError as error:
        raise OutputFailed(f"converting {str(path)!r}: {reason(error)}") from error


def _batches(path: Path, rows: int, columns: list[str] | None) -> Iterator[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            if columns is None:
                yield from file.iter_batches(batch_size=rows)
            else:
                yield _Count(file.metadata.num_rows)
        return
    import pyarrow

    with pyarrow.OSFile(str(path)) as raw, pyarrow.ipc.open_file(raw) as file:
        for index in range(file.num_record_batches):
            yield file.get_batch(index)


class _Count:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows


def _block(batch: Any, name: str, dtype: np.dtype[Any], width: int, path: str) -> Any:
    """(rows, width) of the batch."""
    import pyarrow

    wanted = pyarrow.from_numpy_dtype(dtype)
    names = batch.schema.names
    kind = batch.schema.field(name if name in names else 0).type if names else None
    if name in names or (len(names) == 1 and _is_list(kind)):
        column = batch.column(name if name in names else 0)
        if _is_list(column.type):
            flat = column.flatten()
            even = pyarrow.types.is_fixed_size_list(column.type) or all(
                size == width for size in column.value_lengths().to_pylist()
            )
            if column.null_count or not even or len(flat) != len(column) * width:
                raise FileFormat(f"{path!r}: a row of column {name!r} has not {width} elements")
            return _numbers(flat, wanted, name, path).reshape(len(column), width)
        columns = {name: column}
    else:
        columns = dict(zip(names, batch.columns, strict=True))
    if len(columns) != width:
        raise FileFormat(
            f"{path!r} has {len(columns)} columns where a row of input {name!r} has {width} "
            f"elements; give a list column named {name!r} or one column per element"
        )
    return np.stack([_numbers(c, wanted, key, path) for key, c in columns.items()], axis=1)


def _is_list(kind: Any) -> bool:
    import pyarrow

    return bool(
        pyarrow.types.is_fixed_size_list(kind)
        or pyarrow.types.is_list(kind)
        or pyarrow.types.is_large_list(kind)
    )


def _numbers(column: Any, wanted: Any, name: str, path: str) -> Any:
    if column.type != wanted:
        raise FileFormat(f"{path!r}: column {name!r} is of {column.type}, the model takes {wanted}")
    if column.null_count:
        raise FileFormat(f"{path!r}: column {name!r} holds nulls")
    return column.to_numpy(zero_copy_only=False)
