"""What the executor asks of an engine. TensorRT, ONNX Runtime and the tests' fake implement it.

Life cycle: `__init__` stores, `load` reads the model and allocates what all slots share,
`make_slot` allocates what one slot owns, `close` frees. A slot is used by one thread only, from
`activate` to `close`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from producer.spec import TensorSpec

Array: TypeAlias = npt.NDArray[Any]

#: Parts of a batch on a device, in their order on the stream.
DEVICE_STAGES = ("h2d", "execute", "d2h")
#: Functions of a model's own on the host, before and after the engine (see hooks.py).
PREPROCESS = "preprocess"
POSTPROCESS = "postprocess"
#: All that `Slot.stage_ms` may hold, in the order of their work.
RUN_STAGES = (PREPROCESS, *DEVICE_STAGES, POSTPROCESS)


class EngineSpec(NamedTuple):
    """What the loaded model itself says. Row shapes have no batch axis; None is dynamic."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Slot(Protocol):
    """Buffers and execution state of one batch at a time."""

    def activate(self) -> None:
        """Bind the slot to the calling thread (a CUDA context, for instance)."""

    def input_buffer(self, name: str, rows: int, row_shape: tuple[int, ...]) -> Array:
        """A writable C-contiguous array of shape (rows, *row_shape) that `run` reads from.

        It is the slot's own memory, grown when needed and never shrunk; its content is undefined.
        """

    @property
    def stage_ms(self) -> Mapping[str, float]:
        """Time in ms of those of RUN_STAGES that were measured in the last run."""

    def close(self) -> None:
        """Free the slot's memory. Runs in the slot's thread."""


class Engine(Protocol):
    """A model that can run batches."""

    def load(self) -> None:
        """Read the model. Raises ModelFileError or MissingExtra with what to do."""

    @property
    def spec(self) -> EngineSpec:
        """Inputs and outputs as the model file declares them. Valid after `load`."""

    @property
    def capacity(self) -> int | None:
        """Most rows that one run takes, or None when the model itself sets no limit."""

    def warm_sizes(self, max_batch: int) -> Sequence[int]:
        """Batch sizes, up to `max_batch`, that a slot should run before it serves."""

    def padded_rows(self, rows: int) -> int:
        """Rows that are computed for a batch of `rows` rows: more where `run` fills batches up."""

    def make_slot(self) -> Slot:
        """A new slot; raises EngineFailed when its memory cannot be had."""

    def run(self, slot: Any, rows: int) -> Mapping[str, Array]:
        """Run the first `rows` rows of the slot's input buffers.

        Returns output arrays of shape (rows, ...), which stay valid until the slot's next run.
        Raises EngineFailed, or HookFailed where the model has hooks; after it the slot is usable
        again. Several slots may run at once.
        """

    def close(self) -> None:
        """Free everything; slots are closed before."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a TensorSpec's dtype name."""
    return np.dtype(name)
