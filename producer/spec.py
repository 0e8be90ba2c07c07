"""What a model takes and gives, as workers publish it and clients check against it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from producer.quote import quoted

#: dtypes that may travel: fixed-size numbers and booleans, little-endian. No object, string,
#: structured or void dtype, and no complex numbers, which no engine here takes.
DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)

#: Most axes of a tensor, the batch axis counted.
MAX_RANK = 32
#: Most inputs, and most outputs, of a model.
MAX_TENSORS = 256
#: Whole numbers that Redis' Lua and JSON hold exactly.
MAX_COUNT = 2**53 - 1

#: One part in so many of a queue is kept for each more urgent priority.
_RESERVED_PART = 20

_Size = Annotated[int, Field(ge=0)]
_Limit = Annotated[int, Field(ge=1, le=MAX_COUNT)]


def _travels(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {quoted(dtype)} cannot travel")
    return dtype


class TensorSpec(BaseModel):
    """One input or output. `shape` is one row's shape, without the batch axis; None is dynamic."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(max_length=4096)
    dtype: Annotated[str, AfterValidator(_travels)]
    shape: tuple[_Size | None, ...] = Field(max_length=MAX_RANK - 1)


class ModelSpec(BaseModel):
    """A model as published in Redis. Every input and output has a leading batch axis of rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    inputs: tuple[TensorSpec, ...] = Field(max_length=MAX_TENSORS)
    outputs: tuple[TensorSpec, ...] = Field(max_length=MAX_TENSORS)
    max_batch: _Limit
    #: Most rows that one task may hold; the worker never splits a task over two batches.
    max_rows_per_task: _Limit
    max_task_bytes: _Limit = 16 << 20
    queue_max_rows: _Limit = 100_000
    queue_max_bytes: _Limit = 256 << 20
    #: Rows that one saturated worker holds: more work than this rings for another worker.
    cover_rows: _Limit = 256
    forbid_nan: bool = False

    def queue_limits(self, priority: int) -> tuple[int, int]:
        """Rows and bytes up to which the queue takes tasks of `priority`, its place in PRIORITIES.

        A twentieth is kept for each more urgent priority: a flood of tasks that are not urgent
        fills a queue up to there, and urgent ones still find room.
        """
        return (
            _lessened(self.queue_max_rows, priority, self.max_rows_per_task),
            _lessened(self.queue_max_bytes, priority, self.max_task_bytes),
        )


def _lessened(limit: int, priority: int, task: int) -> int:
    # An empty queue takes every task.
    return max(limit - priority * (limit // _RESERVED_PART), min(limit, task))
