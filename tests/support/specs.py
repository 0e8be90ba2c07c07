"""A published model for tests of the queue alone."""

from __future__ import annotations

from producer.spec import ModelSpec, TensorSpec

SPEC = ModelSpec(
    name="m",
    inputs=(TensorSpec(name="x", dtype="uint8", shape=(1,)),),
    outputs=(TensorSpec(name="y", dtype="uint8", shape=(1,)),),
    max_batch=4,
    max_rows_per_task=4,
    # 20 for tasks of normal priority.
    queue_max_rows=21,
    queue_max_bytes=1000,
    cover_rows=8,
)
