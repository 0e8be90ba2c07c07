"""Runs ONNX models on the CPU with ONNX Runtime, reading and writing a slot's own buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from producer.errors import EngineFailed, MissingExtra, ModelFileError
from producer.spec import TensorSpec
from workers.engines.base import Array, EngineSpec, numpy_dtype
from workers.engines.host_buffer import HostBuffer

_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(int8)": "int8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(uint8)": "uint8",
    "tensor(uint16)": "uint16",
    "tensor(uint32)": "uint32",
    "tensor(uint64)": "uint64",
    "tensor(float16)": "float16",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
}
_FATAL_ONLY = 4


class OnnxRuntimeSlot:
    """One batch at a time: input and output buffers and the binding of them to the session."""

    def __init__(self, session: Any, spec: EngineSpec, max_batch: int) -> None:
        self._spec = spec
        self._binding = session.io_binding()
        self._inputs = {t.name: HostBuffer(numpy_dtype(t.dtype)) for t in spec.inputs}
        # Where a row's shape is known the output is written in place, else ONNX Runtime allocates.
        self._outputs = {
            t.name: HostBuffer(numpy_dtype(t.dtype)) for t in spec.outputs if None not in t.shape
        }
        self._row_shapes: dict[str, tuple[int, ...]] = {}
        self._bound: tuple[Any, ...] = ()
        self._views: dict[str, Array] = {}
        for tensor, buffers in [
            *((t, self._inputs) for t in spec.inputs),
            *((t, self._outputs) for t in spec.outputs),
        ]:
            if None not in tensor.shape:
                buffers[tensor.name].array(max_batch, _static(tensor))

    def activate(self) -> None:
        """Nothing to do: ONNX Runtime's CPU sessions know no thread."""

    def input_buffer(self, name: str, rows: int, row_shape: tuple[int, ...]) -> Array:
        """The slot's memory for input `name`, as (rows, *row_shape); see Slot.input_buffer."""
        self._row_shapes[name] = row_shape
        return self._inputs[name].array(rows, row_shape)

    @property
    def stage_ms(self) -> Mapping[str, float]:
        """Nothing is copied to a device."""
        return {}

    def bind(self, rows: int) -> Any:
        """The binding, for a run of the first `rows` rows; raises EngineFailed if one lacks."""
        shapes = []
        for tensor in self._spec.inputs:
            shape = self._row_shapes.get(tensor.name)
            if shape is None or self._inputs[tensor.name].rows(shape) < rows:
                raise EngineFailed(
                    f"input {tensor.name!r} was not given {rows} rows: call input_buffer first"
                )
            shapes.append(shape)
        wanted = (rows, *shapes, *(buffer.address for buffer in self._inputs.values()))
        if wanted != self._bound:
            self.unbind()
            for tensor, shape in zip(self._spec.inputs, shapes, strict=True):
                buffer = self._inputs[tensor.name]
                self._binding.bind_input(
                    tensor.name, "cpu", 0, buffer.dtype.type, [rows, *shape], buffer.address
                )
        for tensor in self._spec.outputs:
            if tensor.name not in self._outputs:
                # Anew for every run: a binding keeps the last run's array and its shape.
                self._binding.bind_output(tensor.name, "cpu")
            elif wanted != self._bound:
                buffer = self._outputs[tensor.name]
                view = buffer.array(rows, _static(tensor))
                self._binding.bind_output(
                    tensor.name, "cpu", 0, buffer.dtype.type, list(view.shape), buffer.address
                )
                self._views[tensor.name] = view
        self._bound = wanted
        return self._binding

    def unbind(self) -> None:
        """Forgets what is bound, so that the next run binds anew."""
        self._bound = ()
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()

    def results(self) -> dict[str, Array]:
        """The outputs of the run that just ended, in the model's order."""
        if len(self._outputs) == len(self._spec.outputs):
            return {tensor.name: self._views[tensor.name] for tensor in self._spec.outputs}
        fetched = self._binding.get_outputs()
        return {
            tensor.name: self._views[tensor.name] if tensor.name in self._outputs else value.numpy()
            for tensor, value in zip(self._spec.outputs, fetched, strict=True)
        }

    def close(self) -> None:
        """Frees the buffers; arrays that were handed out keep theirs alive."""
        self.unbind()
        self._inputs = {}
        self._outputs = {}
        self._views = {}


class OnnxRuntimeEngine:
    """An ONNX model on the CPU. Slots may run at once in threads of their own.

    `threads` is the number of threads within one operator of one run (0: ONNX Runtime's choice,
    all cores); several slots share them. `max_batch` is the number of rows for which slots
    allocate at first.
    """

    def __init__(self, path: Path, *, threads: int = 0, max_batch: int = 64) -> None:
        self._path = path
        self._threads = threads
        self._max_batch = max_batch
        self._session: Any = None
        self._spec: EngineSpec | None = None
        self._capacity: int | None = None
        self._failures: tuple[type[Exception], ...] = ()

    def load(self) -> None:
        """Reads the model.

        Raises MissingExtra without onnxruntime, and ModelFileError for a file that is missing, is
        no ONNX model, or has an input or output without a batch axis or of another dtype.
        """
        try:
            import onnxruntime
            from onnxruntime.capi import onnxruntime_pybind11_state as binding
        except ImportError as failure:
            raise MissingExtra(
                f"ONNX models need onnxruntime ({failure}): pip install 'trtq[cpu]'"
            ) from failure
        if not self._path.is_file():
            raise ModelFileError(f"model file {self._path} does not exist or is no file")
        # ONNX Runtime's errors have no common base; a plain C++ error arrives as RuntimeError.
        self._failures = (
            RuntimeError,
            *(
                kind
                for kind in vars(binding).values()
                if isinstance(kind, type) and issubclass(kind, Exception)
            ),
        )
        try:
            session = onnxruntime.InferenceSession(
                str(self._path), self._options(onnxruntime), providers=["CPUExecutionProvider"]
            )
        except self._failures as failure:
            raise ModelFileError(
                f"{self._path} cannot be loaded as an ONNX model: {_first_line(failure)}"
            ) from failure
        self._take(session)

    @property
    def spec(self) -> EngineSpec:
        """Inputs and outputs as the model declares them; raises EngineFailed before `load`."""
        if self._spec is None:
            raise EngineFailed(f"{self._path} is not loaded: call load first")
        return self._spec

    @property
    def capacity(self) -> int | None:
        """1 for a model exported with a batch axis of one, else None: no limit."""
        return self._capacity

    def warm_sizes(self, max_batch: int) -> Sequence[int]:
        """The smallest and the largest: memory is allocated then."""
        return sorted({1, max_batch})

    def padded_rows(self, rows: int) -> int:
        """`rows`: every size runs as it is."""
        return rows

    def make_slot(self) -> OnnxRuntimeSlot:
        """A slot with buffers for `max_batch` rows. Raises EngineFailed without memory for it."""
        rows = self._max_batch if self._capacity is None else self._capacity
        spec = self.spec
        try:
            return OnnxRuntimeSlot(self._session, spec, rows)
        except MemoryError as failure:
            raise EngineFailed(
                f"{self._path}: no memory for a slot of {rows} rows; lower max_batch or slots"
            ) from failure

    def run(self, slot: OnnxRuntimeSlot, rows: int) -> Mapping[str, Array]:
        """Runs `rows` rows of the slot's inputs; see Engine.run. Raises EngineFailed."""
        if self._session is None:
            raise EngineFailed(f"{self._path} is not loaded: call load first")
        if rows < 1 or (self._capacity is not None and rows > self._capacity):
            raise EngineFailed(f"{self._path} runs 1 to {self._capacity or 'any'} rows, not {rows}")
        try:
            self._session.run_with_iobinding(slot.bind(rows))
            return slot.results()
        except self._failures as failure:
            slot.unbind()
            raise EngineFailed(
                f"{self._path.name} failed on {rows} rows: {_first_line(failure)}"
            ) from failure

    def close(self) -> None:
        """Frees the model."""
        self._session = None

    def _options(self, onnxruntime: Any) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _FATAL_ONLY  # errors are raised, not logged twice
        # Spinning threads would take the cores that the worker's own threads need between batches.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        return options

    def _take(self, session: Any) -> None:
        fixed: set[int] = set()
        inputs = tuple(self._tensor("input", node, fixed) for node in session.get_inputs())
        outputs = tuple(self._tensor("output", node, fixed) for node in session.get_outputs())
        if not inputs:
            raise ModelFileError(f"{self._path} has no inputs, so there is nothing to batch")
        self._capacity = 1 if fixed else None
        self._spec = EngineSpec(inputs, outputs)
        self._session = session

    def _tensor(self, kind: str, node: Any, fixed: set[int]) -> TensorSpec:
        what = f"{self._path}: {kind} {node.name!r}"
        dtype = _DTYPES.get(node.type)
        if dtype is None:
            raise ModelFileError(f"{what} is a {node.type}, which cannot travel; use a number type")
        if not node.shape:
            raise ModelFileError(
                f"{what} has no batch axis: export it with a dynamic first axis, one entry a row"
            )
        batch, *row = node.shape
        if isinstance(batch, int):
            if batch != 1:
                raise ModelFileError(
                    f"{what} has a batch axis fixed to {batch}: export it with a dynamic batch axis"
                )
            fixed.add(batch)
        shape = tuple(size if isinstance(size, int) and size >= 0 else None for size in row)
        return TensorSpec(name=node.name, dtype=dtype, shape=shape)


def _static(tensor: TensorSpec) -> tuple[int, ...]:
    return tuple(size for size in tensor.shape if size is not None)


def _first_line(failure: Exception) -> str:
    text = str(failure).strip() or type(failure).__name__
    return text.splitlines()[0][:500]
