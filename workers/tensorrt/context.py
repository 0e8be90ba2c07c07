"""An execution context of one optimization profile, and what it was last given."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from producer.errors import EngineFailed
from workers.tensorrt.graphs import Capture
from workers.tensorrt.outputs import OutputAllocator
from workers.tensorrt.profiles import Shape

#: Shapes and CUDA graphs that are remembered; more kinds of batches than that gain nothing.
_KEPT = 256
_NO_LOCK = nullcontext()

_Key = tuple[tuple[Shape, ...], tuple[int, ...]]


class PlanContext:
    """Shapes, addresses and enqueueing of one execution context. One thread at a time.

    `calls` is held around every call into TensorRT (see Flavor.calls). With `capture`, a kind of
    batch (its shapes and addresses) that comes again is captured as a CUDA graph. `capturing` is
    held meanwhile: no execution context may be made then.
    """

    def __init__(
        self,
        context: Any,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        calls: AbstractContextManager[Any],
        capture: Capture | None = None,
        capturing: AbstractContextManager[Any] = _NO_LOCK,
    ) -> None:
        self._context = context
        self._inputs = inputs
        self._outputs = outputs
        self._calls = calls
        self._capture = capture
        self._captures = capture is not None
        self._capturing = capturing
        # The next batch's, and what TensorRT was told: a batch that is a graph needs no telling.
        self._shapes: tuple[Shape, ...] = ()
        self._addresses: dict[str, int] = {}
        self._told_shapes: tuple[Shape, ...] = ()
        self._told_addresses: dict[str, int] = {}
        self._allocators: dict[str, OutputAllocator] = {}
        self._output_shapes: OrderedDict[tuple[Shape, ...], dict[str, Shape]] = OrderedDict()
        self._seen: OrderedDict[_Key, None] = OrderedDict()
        self._graphs: OrderedDict[_Key, Any] = OrderedDict()

    def set_shapes(self, shapes: dict[str, Shape]) -> dict[str, Shape]:
        """Sets the inputs' shapes; returns the outputs' (-1: depends on the data).

        Raises EngineFailed for a shape that TensorRT refuses.
        """
        wanted = tuple(shapes[name] for name in self._inputs)
        known = self._output_shapes.get(wanted)
        if known is None:
            with self._calls:
                self._tell_shapes(wanted)
                known = {
                    name: tuple(int(size) for size in self._context.get_tensor_shape(name))
                    for name in self._outputs
                }
            _remember(self._output_shapes, wanted, known)
        self._shapes = wanted
        return known

    def bind(self, addresses: dict[str, int]) -> None:
        """Gives every tensor its device memory."""
        self._addresses = addresses

    def allocate_by(self, name: str, allocator: OutputAllocator) -> None:
        """Lets `allocator` give output `name` its memory once its shape is known.

        A second call with the same allocator does nothing. Raises EngineFailed.
        """
        if self._allocators.get(name) is allocator:
            return
        with self._calls:
            if not self._context.set_output_allocator(name, allocator.native):
                raise EngineFailed(f"TensorRT refused an output allocator for {name!r}")
        self._allocators[name] = allocator

    def enqueue(self, stream: int) -> bool:
        """Puts the batch on the stream; False where TensorRT refuses."""
        graph = self._graphs.get(self._key)
        if graph is not None and self._capture is not None:
            self._capture.launch(graph, stream)
            return True
        return self._execute(stream)

    def after_run(self, stream: int) -> None:
        """Captures the batch that has just run, and been waited for, if its kind came before."""
        key = self._key
        if self._capture is None or not self._captures or key in self._graphs:
            return
        if key not in self._seen:
            _remember(self._seen, key, None)
            return
        with self._capturing:
            graph = self._capture.record(stream, lambda: self._execute(stream))
        if graph is None:
            # What cannot be captured once never can: it may wait for the host in between.
            self._captures = False
            return
        dropped = _remember(self._graphs, key, graph)
        if dropped is not None:
            self._capture.destroy(dropped)

    def close(self) -> None:
        """Destroys the graphs, then the context."""
        while self._graphs:
            _, graph = self._graphs.popitem()
            if self._capture is not None:
                self._capture.destroy(graph)
        with self._calls:
            self._context = None

    def _execute(self, stream: int) -> bool:
        with self._calls:
            self._tell_shapes(self._shapes)
            self._tell_addresses()
            return bool(self._context.execute_async_v3(stream))

    def _tell_shapes(self, wanted: tuple[Shape, ...]) -> None:
        if wanted == self._told_shapes:
            return
        # Unknown until all are set: a refusal leaves the context between two shapes.
        self._told_shapes = ()
        for name, shape in zip(self._inputs, wanted, strict=True):
            if not self._context.set_input_shape(name, shape):
                raise EngineFailed(f"TensorRT refused shape {shape} of input {name!r}")
        self._told_shapes = wanted

    def _tell_addresses(self) -> None:
        for name, address in self._addresses.items():
            if self._told_addresses.get(name) != address:
                self._context.set_tensor_address(name, address)
                self._told_addresses[name] = address

    @property
    def _key(self) -> _Key:
        return self._shapes, tuple(self._addresses.values())


def _remember(kept: OrderedDict[Any, Any], key: Any, value: Any) -> Any:
    """Adds to `kept`; returns the oldest value where that one had to go."""
    kept[key] = value
    return kept.popitem(last=False)[1] if len(kept) > _KEPT else None
