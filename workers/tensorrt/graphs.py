"""CUDA graphs by stream capture.

TensorRT for RTX can capture by itself, but anew at each change of a shape; these are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from producer.errors import EngineFailed

log = logging.getLogger("trtq.tensorrt")


class Capture(Protocol):
    """Records what is enqueued on a stream, and plays it back."""

    def record(self, stream: int, enqueue: Callable[[], Any]) -> Any | None:
        """An executable graph of what `enqueue` puts on the stream; None if it cannot be one."""

    def launch(self, graph: Any, stream: int) -> None:
        """Puts a graph on a stream. Raises EngineFailed."""

    def destroy(self, graph: Any) -> None:
        """Frees a graph."""


def find_capture() -> Capture | None:
    """Capture by the package cuda-bindings; None where that is not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return StreamCapture(runtime)


class StreamCapture:
    """Stream capture through cuda.bindings.runtime, in the context that is current."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def record(self, stream: int, enqueue: Callable[[], Any]) -> Any | None:
        """See Capture; what `enqueue` refuses or CUDA cannot capture is logged."""
        runtime = self._runtime
        handle = runtime.cudaStream_t(stream)
        # Other threads' calls (allocations of their slots) must not end this capture.
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        try:
            self._checked(runtime.cudaStreamBeginCapture(handle, mode))
            accepted = enqueue()
            (graph,) = self._checked(runtime.cudaStreamEndCapture(handle))
        except EngineFailed as failure:
            log.info("a batch cannot be captured as a CUDA graph: %s", failure)
            return None
        try:
            if not accepted:
                return None
            (executable,) = self._checked(runtime.cudaGraphInstantiate(graph, 0))
            return executable
        finally:
            self._checked(runtime.cudaGraphDestroy(graph))

    def launch(self, graph: Any, stream: int) -> None:
        """See Capture."""
        runtime = self._runtime
        self._checked(runtime.cudaGraphLaunch(graph, runtime.cudaStream_t(stream)))

    def destroy(self, graph: Any) -> None:
        """See Capture."""
        self._checked(self._runtime.cudaGraphExecDestroy(graph))

    def _checked(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        error, *values = answer
        if int(error):
            raise EngineFailed(f"CUDA graphs: {error.name}")
        return tuple(values)
