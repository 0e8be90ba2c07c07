"""What a model takes and gives, as workers publish it and clients check against it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

#: dtypes that may travel: fixed-size numbers and booleans, little-endian. No object, string,
#: structured or void dtype, and no complex numbers, which no engine here takes.
DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)


class TensorSpec(BaseModel):
    """One input or output. `shape` is one row's shape, without the batch axis; None is dynamic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class ModelSpec(BaseModel):
    """A model as published in Redis. Every input and output has a leading batch axis of rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch: int = Field(ge=1)
    #: Most rows that one task may hold; the worker never splits a task over two batches.
    max_rows_per_task: int = Field(ge=1)
    max_task_bytes: int = Field(default=16 << 20, ge=1)
    queue_max_rows: int = Field(default=100_000, ge=1)
    queue_max_bytes: int = Field(default=256 << 20, ge=1)
    #: Rows that one saturated worker holds: more work than this rings for another worker.
    cover_rows: int = Field(default=256, ge=1)
    forbid_nan: bool = False
