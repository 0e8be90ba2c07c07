"""Optimization profiles: the shapes, per input, that a plan is built for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from producer.errors import EngineBuildFailed
from workers.tensorrt.options import Profile

Shape: TypeAlias = tuple[int, ...]

#: How TensorRT writes a dynamic axis.
DYNAMIC = -1


class ShapeRange(NamedTuple):
    """Smallest, best and largest shape of one input, batch axis first."""

    min: Shape
    opt: Shape
    max: Shape


def shape_ranges(
    inputs: Mapping[str, Shape], profiles: Sequence[Profile]
) -> list[dict[str, ShapeRange]]:
    """For each profile the ranges of all dynamic inputs; fixed inputs need none.

    `inputs`: name -> shape with the batch axis, -1 for a dynamic axis. A dynamic first axis takes
    the profile's batch bounds, every further dynamic axis one entry of `axes`.
    Raises EngineBuildFailed for an input that has no such axes, or not as many as are given.
    """
    return [_ranges(inputs, profile, number) for number, profile in enumerate(profiles)]


def _ranges(inputs: Mapping[str, Shape], profile: Profile, number: int) -> dict[str, ShapeRange]:
    unknown = sorted(set(profile.axes) - set(inputs))
    if unknown:
        raise EngineBuildFailed(
            f"profile {number} bounds axes of {', '.join(map(repr, unknown))}, but the model's "
            f"inputs are {', '.join(map(repr, inputs))}: correct build.profiles"
        )
    batch = (profile.min_batch, profile.opt_batch, profile.max_batch)
    found = {}
    for name, shape in inputs.items():
        dynamic = [axis for axis, size in enumerate(shape) if size == DYNAMIC]
        given = profile.axes.get(name, ())
        needed = [axis for axis in dynamic if axis > 0]
        if len(given) != len(needed):
            raise EngineBuildFailed(
                f"input {name!r} has shape {shape}, with dynamic axes {needed} after the batch "
                f"axis, but profile {number} bounds {len(given)} of its axes: give one "
                f"[min, opt, max] for each in build.profiles.axes.{name}"
            )
        if dynamic:
            bounds = dict(zip(needed, given, strict=True))
            if dynamic[0] == 0:
                bounds[0] = batch
            found[name] = ShapeRange(*(_fill(shape, bounds, which) for which in range(3)))
    return found


def _fill(shape: Shape, bounds: Mapping[int, tuple[int, int, int]], which: int) -> Shape:
    return tuple(
        bounds[axis][which] if size == DYNAMIC else size for axis, size in enumerate(shape)
    )
