"""The two things that travel: an inference task and its reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

Buffer: TypeAlias = "bytes | memoryview"


class Tensor(NamedTuple):
    """A named array as raw bytes: C-contiguous, little-endian, batch axis first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


class RowReference(NamedTuple):
    """Rows `start` to `stop` of .npy files: read from `inputs`, written to `outputs`."""

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    start: int
    stop: int


class RowError(NamedTuple):
    """One row of a referenced range that failed: its index in the file, error code, message."""

    row: int
    code: str
    message: str


class InferenceTask(NamedTuple):
    """One request: a few rows of one model.

    Exactly one of `inputs` and `reference` is set. `task_id` is `<client>-<number>`, so whoever
    can read it knows the sender. `ttl_ms` counts from the moment Redis accepted the task, by
    Redis' clock; 0 is no deadline. `store_s` keeps the reply under the task's id that long.
    """

    task_id: str
    rows: int
    inputs: tuple[Tensor, ...] = ()
    reference: RowReference | None = None
    ttl_ms: int = 0
    store_s: int = 0
    trace: Mapping[str, str] | None = None


class Reply(NamedTuple):
    """The answer to one task: `outputs`, or `row_errors` of a reference, or an error.

    Or, where an idempotency key led to an earlier task, that task's id as `stored_as`: its stored
    reply is the answer.
    """

    task_id: str
    outputs: tuple[Tensor, ...] = ()
    row_errors: tuple[RowError, ...] = ()
    error_code: str = ""
    error_message: str = ""
    stored_as: str = ""


def client_of(task_id: str) -> str:
    """The client's id inside a task id."""
    return task_id.rpartition("-")[0]
