"""Ranges of NVTX: what a profiler such as Nsight Systems shows of the stages of a batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from producer.errors import MissingExtra

DOMAIN = "trtq"
#: The turn asks Redis for what is there.
CLAIM = "claim"
#: The turn waits in Redis for work, and claims it when it comes.
WAIT = "wait"

_NOTHING = nullcontext()


class Ranges:
    """Opens ranges for one model, which is their category. `nvtx`: the module; None: no ranges."""

    __slots__ = ("_model", "_nvtx")

    def __init__(self, model: str = "", nvtx: Any = None) -> None:
        self._model = model
        self._nvtx = nvtx

    def open(self, stage: str, count: int | None = None) -> AbstractContextManager[object]:
        """A range of the calling thread while the block runs; `count` rows or tasks are in it."""
        if self._nvtx is None:
            return _NOTHING
        opened: AbstractContextManager[object] = self._nvtx.annotate(
            stage, domain=DOMAIN, category=self._model, payload=count
        )
        return opened


NO_RANGES = Ranges()


def import_nvtx() -> Any:
    """The module nvtx; raises MissingExtra."""
    try:
        import nvtx
    except ImportError as failure:
        raise MissingExtra(
            f"TRTQ_NVTX needs the package nvtx ({failure}): pip install 'trtq[profiling]', or "
            "unset it"
        ) from failure
    return nvtx
