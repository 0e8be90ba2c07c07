"""What a caller hands over becomes tensors of the model, or an error before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from producer.errors import (
    CorruptMessage,
    ForbiddenNaN,
    NoRows,
    TooManyRows,
    WrongDtype,
    WrongInputName,
    WrongShape,
)
from producer.quote import quoted
from producer.spec import DTYPES, ModelSpec, TensorSpec
from producer.task import Tensor

#: Whole numbers beyond it are not all float64 numbers.
_EXACT = 2**53
_MOST_AXES = 64


class PreparedInputs(NamedTuple):
    """Tensors ready for the wire. `single` says that the caller gave one row without batch axis."""

    tensors: tuple[Tensor, ...]
    rows: int
    single: bool


def prepare(spec: ModelSpec, inputs: object) -> PreparedInputs:
    """Checks `inputs` against `spec` and copies them once, into the bytes that will travel.

    `inputs` is an array (models with one input) or a mapping of input name to array. An array
    with the rank of the model's row is one row; with one axis more, in front, it is several
    rows. All inputs of a task agree on that and on the number of rows. An ndarray must have the
    model's dtype or one that converts to it safely (`numpy.can_cast(..., "safe")`); lists and
    numbers take the model's dtype where no value changes by more than rounding of a float. An
    array with masked elements is refused: its mask could not travel.

    Raises WrongInputName, WrongDtype, WrongShape, NoRows, TooManyRows, ForbiddenNaN.
    """
    named = _by_name(spec, inputs)
    tensors = []
    rows: int | None = None
    single: bool | None = None
    for tensor in spec.inputs:
        array = _array(spec, tensor, named[tensor.name])
        one = array.ndim == len(tensor.shape)
        if not one and array.ndim != len(tensor.shape) + 1:
            raise WrongShape(
                f"{_where(spec, tensor)} takes one row of shape {_text(tensor.shape)} or a batch "
                f"with one axis in front, not an array of shape {array.shape}"
            )
        if one:
            array = array[None]
        _check_shape(spec, tensor, array.shape[1:])
        if single is None or rows is None:
            single, rows = one, array.shape[0]
        elif (one, array.shape[0]) != (single, rows):
            raise WrongShape(
                f"model {spec.name!r}: input {tensor.name!r} has {_rows(array.shape[0], one)} "
                f"where {spec.inputs[0].name!r} has {_rows(rows, single)}; give all inputs the "
                "same number of rows, all with or all without the batch axis"
            )
        if spec.forbid_nan and array.dtype.kind == "f" and np.isnan(array).any():
            raise ForbiddenNaN(f"{_where(spec, tensor)} holds NaN, which the model forbids")
        tensors.append(Tensor(tensor.name, tensor.dtype, array.shape, array.tobytes()))
    if not rows:
        raise NoRows(f"model {spec.name!r}: a task needs at least one row, this one has none")
    if rows > spec.max_rows_per_task:
        raise TooManyRows(
            f"model {spec.name!r} takes at most {spec.max_rows_per_task} rows a task, "
            f"this one has {rows}; split it (Client.map does) or raise max_rows_per_task"
        )
    return PreparedInputs(tuple(tensors), rows, bool(single))


def check_tensors(spec: ModelSpec, tensors: tuple[Tensor, ...], rows: int) -> None:
    """The worker's check of what arrived, with the same errors as `prepare`."""
    if len(tensors) != len(spec.inputs):
        raise WrongInputName(
            f"model {spec.name!r} takes inputs {_names(spec)}, not "
            f"{quoted([t.name for t in tensors])}"
        )
    for tensor, given in zip(spec.inputs, tensors, strict=True):
        if given.name != tensor.name:
            raise WrongInputName(
                f"model {spec.name!r} takes inputs {_names(spec)}, not "
                f"{quoted([t.name for t in tensors])}"
            )
        if given.dtype != tensor.dtype:
            raise WrongDtype(f"{_where(spec, tensor)} is {tensor.dtype}, not {given.dtype}")
        if not given.shape or given.shape[0] != rows:
            raise WrongShape(f"{_where(spec, tensor)}: shape {given.shape} has not {rows} rows")
        _check_shape(spec, tensor, given.shape[1:])
        if given.dtype == "bool" and (np.frombuffer(given.data, np.uint8) > 1).any():
            # Engines read such a byte as whatever their compiler makes of it.
            raise WrongDtype(f"{_where(spec, tensor)} holds bytes that are neither 0 nor 1")
    if rows < 1:
        raise NoRows(f"model {spec.name!r}: a task needs at least one row, this one has none")
    if rows > spec.max_rows_per_task:
        raise TooManyRows(
            f"model {spec.name!r} takes at most {spec.max_rows_per_task} rows a task, not {rows}"
        )


def to_arrays(tensors: tuple[Tensor, ...], *, single: bool, by_name: bool = False) -> Any:
    """The caller's view of outputs: read-only arrays over the received bytes, without copying.

    One array if the model has one output (unless `by_name`), else a dict by name; without the
    batch axis if the inputs had none. Raises CorruptMessage for several rows where there is one.
    """
    arrays = {}
    for name, dtype, shape, data in tensors:
        if single and (not shape or shape[0] != 1):
            raise CorruptMessage(f"output {quoted(name)} of shape {shape} is not the one row asked")
        # One row has the same bytes with and without its batch axis.
        arrays[name] = np.frombuffer(data, dtype).reshape(shape[1:] if single else shape)
    if len(arrays) == 1 and not by_name:
        return next(iter(arrays.values()))
    return arrays


def _by_name(spec: ModelSpec, inputs: object) -> Mapping[str, Any]:
    if isinstance(inputs, Mapping):
        wanted = {tensor.name for tensor in spec.inputs}
        if set(inputs) != wanted:
            missing, extra = sorted(wanted - set(inputs)), sorted(map(str, set(inputs) - wanted))
            parts = [f"lacks {missing}"] * bool(missing)
            parts += [f"knows no {quoted(extra)}"] * bool(extra)
            raise WrongInputName(
                f"model {spec.name!r} takes inputs {_names(spec)}: this task "
                + " and it ".join(parts)
            )
        return inputs
    if len(spec.inputs) != 1:
        raise WrongInputName(
            f"model {spec.name!r} takes inputs {_names(spec)}: give a dict of arrays by name"
        )
    return {spec.inputs[0].name: inputs}


def _array(spec: ModelSpec, tensor: TensorSpec, value: Any) -> npt.NDArray[Any]:
    wanted = np.dtype(tensor.dtype)
    if isinstance(value, np.ndarray | np.generic):
        if np.ma.is_masked(value):
            raise _masked(spec, tensor)
        array = np.asarray(value)
        if array.dtype == wanted:
            return np.ascontiguousarray(array).reshape(array.shape)
        if array.dtype.name in DTYPES and np.can_cast(array.dtype, wanted, "safe"):
            return array.astype(wanted, order="C")
        raise WrongDtype(
            f"{_where(spec, tensor)} is {tensor.dtype}; {array.dtype} does not convert to it "
            f"without loss (convert it yourself: array.astype({tensor.dtype!r}))"
        )
    kinds = _element_types(value)
    if any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
        raise _masked(spec, tensor)
    for kind in kinds & {str, bytes, dict, type(None)}:
        # numpy would make every element as long as the longest text.
        raise WrongDtype(
            f"{_where(spec, tensor)} is {tensor.dtype}; a value of type {kind.__name__} in it is "
            "no number"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RecursionError) as failure:
        raise WrongDtype(
            f"{_where(spec, tensor)}: no array of numbers: {str(failure)[:300]}"
        ) from None
    if array.dtype.name not in DTYPES and not (array.size == 0 and array.ndim):
        raise WrongDtype(
            f"{_where(spec, tensor)} is {tensor.dtype}; a value of type "
            f"{type(value).__name__} becomes {array.dtype}, which is no number"
        )
    with np.errstate(all="ignore"):
        converted = np.asarray(array.astype(wanted), order="C")
        if wanted.kind == "f" and array.dtype.kind == "f":
            same = bool((np.isfinite(converted) == np.isfinite(array)).all())
        else:
            same = bool((converted == array).all())
        same = same and (not _beyond_exact(array, kinds) or _whole_numbers_same(value, converted))
    if not same or (wanted.kind == "b") != (array.dtype.kind == "b" or array.size == 0):
        raise WrongDtype(f"{_where(spec, tensor)} is {tensor.dtype}; a given value does not fit it")
    return converted


def _element_types(value: Any) -> set[type]:
    """The types of what is in nested lists or tuples, or of the value itself."""
    if not isinstance(value, list | tuple):
        return {type(value)}
    found: set[type] = set()
    level = [value]
    for _ in range(_MOST_AXES):
        if not level:
            break
        inner = []
        for sequence in level:
            kinds = set(map(type, sequence))
            if not kinds.isdisjoint((list, tuple)):
                inner += [item for item in sequence if isinstance(item, list | tuple)]
            found |= kinds
        level = inner
    return found - {list, tuple}


def _beyond_exact(array: npt.NDArray[Any], kinds: set[type]) -> bool:
    """True for whole numbers that a float64 on the way, numpy's or ours, could have changed."""
    if int not in kinds or not array.size or array.dtype.kind not in "iuf":
        return False
    return bool(((array >= _EXACT) | (array <= -_EXACT)).any())


def _whole_numbers_same(value: Any, converted: npt.NDArray[Any]) -> bool:
    # Python compares whole numbers with floats exactly.
    given, taken = np.asarray(value, dtype=object), converted.astype(object)
    return all(
        type(before) is not int or before == after
        for before, after in zip(given.flat, taken.flat, strict=True)
    )


def _masked(spec: ModelSpec, tensor: TensorSpec) -> WrongDtype:
    return WrongDtype(
        f"{_where(spec, tensor)}: an array with masked elements would lose its mask; give "
        "array.filled(value) instead"
    )


def _check_shape(spec: ModelSpec, tensor: TensorSpec, row_shape: tuple[int, ...]) -> None:
    if row_shape == tensor.shape:
        return
    fits = len(row_shape) == len(tensor.shape) and all(
        size == wanted if wanted is not None else size > 0
        for size, wanted in zip(row_shape, tensor.shape, strict=True)
    )
    if not fits:
        raise WrongShape(
            f"{_where(spec, tensor)} takes rows of shape {_text(tensor.shape)}, not {row_shape}"
        )


def _rows(count: int, single: bool) -> str:
    return "one row without a batch axis" if single else f"{count} rows"


def _where(spec: ModelSpec, tensor: TensorSpec) -> str:
    return f"model {spec.name!r}, input {tensor.name!r}"


def _names(spec: ModelSpec) -> list[str]:
    return [tensor.name for tensor in spec.inputs]


def _text(shape: tuple[int | None, ...]) -> str:
    inner = ", ".join("any" if size is None else str(size) for size in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"
