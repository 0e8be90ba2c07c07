"""The `preprocess:` and `postprocess:` blocks of a model's configuration."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from producer.spec import DTYPES, MAX_RANK, MAX_TENSORS, TensorSpec


def _check_function(reference: str) -> str:
    module, colon, function = reference.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ValueError("name a function as module:function, for instance my_hooks:preprocess")
    return reference


def _check_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise ValueError(f"use one of {', '.join(sorted(DTYPES))}")
    return dtype


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class HookTensor(_Strict):
    """One tensor between clients and a hook; `shape` as in TensorSpec: null is a dynamic axis."""

    name: str = Field(min_length=1, max_length=4096)
    dtype: Annotated[str, AfterValidator(_check_dtype)]
    #: The wire carries 32 axes, one of which is the batch.
    shape: list[Annotated[int, Field(ge=1, le=2**31 - 1)] | None] = Field(max_length=MAX_RANK - 1)


def _check_tensors(tensors: list[HookTensor]) -> list[HookTensor]:
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ValueError(f"name 1 to {MAX_TENSORS} tensors")
    twice = [name for name, count in Counter(t.name for t in tensors).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(map(repr, twice))} is named twice")
    return tensors


_Function = Annotated[str, AfterValidator(_check_function)]
_Tensors = Annotated[list[HookTensor], AfterValidator(_check_tensors)]


class PreprocessOptions(_Strict):
    """`function` is called as (inputs, into); `inputs` are what clients send."""

    function: _Function
    inputs: _Tensors

    @property
    def spec(self) -> tuple[TensorSpec, ...]:
        """The inputs as published."""
        return _spec(self.inputs)


class PostprocessOptions(_Strict):
    """`function` is called as (outputs); `outputs` are what it returns and clients get."""

    function: _Function
    outputs: _Tensors

    @property
    def spec(self) -> tuple[TensorSpec, ...]:
        """The outputs as published."""
        return _spec(self.outputs)


def _spec(tensors: list[HookTensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=t.name, dtype=t.dtype, shape=tuple(t.shape)) for t in tensors)
