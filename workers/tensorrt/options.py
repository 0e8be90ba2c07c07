"""The `build:` block of a model's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Profile(_Frozen):
    """One optimization profile: batch bounds in rows, and bounds of other dynamic axes.

    `axes` gives, for an input, one (min, opt, max) per dynamic non-batch axis, in axis order.
    """

    min_batch: int = Field(default=1, ge=1)
    opt_batch: int = Field(ge=1)
    max_batch: int = Field(ge=1)
    axes: dict[str, tuple[tuple[int, int, int], ...]] = {}

    @model_validator(mode="after")
    def _ordered(self) -> Profile:
        bounds = [("batch", (self.min_batch, self.opt_batch, self.max_batch))]
        bounds += [(f"axes of {name!r}", axis) for name, all_ in self.axes.items() for axis in all_]
        for what, (low, best, high) in bounds:
            if not 1 <= low <= best <= high:
                raise ValueError(f"{what}: need 1 <= min <= opt <= max, got {low}, {best}, {high}")
        return self


class Preparation(_Frozen):
    """Input preparation put into the graph: (value * scale - mean) / std, per channel."""

    dtype: Literal["uint8"] = "uint8"
    layout: Literal["nhwc", "nchw"] = "nhwc"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @model_validator(mode="after")
    def _divisible(self) -> Preparation:
        if not self.mean or not self.std or any(value <= 0 for value in self.std):
            raise ValueError("mean and std need a value per channel (or one), and std must be > 0")
        return self


class BuildOptions(_Frozen):
    """How a plan is built from ONNX; without profiles one of 1 / max_batch / max_batch is made."""

    profiles: tuple[Profile, ...] = ()
    fp16: bool = False
    workspace_bytes: int | None = Field(default=None, gt=0)
    timing_cache: bool = True
    prepare: dict[str, Preparation] = {}
    optimization_level: int | None = Field(default=None, ge=0, le=5)

    def profiles_for(self, max_batch: int) -> tuple[Profile, ...]:
        """Return the configured profiles, or the default one for `max_batch` rows."""
        return self.profiles or (Profile(opt_batch=max_batch, max_batch=max_batch),)
