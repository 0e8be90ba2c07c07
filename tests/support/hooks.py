"""Hooks that tests name in model configurations."""

from __future__ import annotations

import time
from collections.abc import Mapping

from workers.engines.base import Array
from workers.engines.hooks import InputBuffers

NUMBER = 3


def copy_inputs(inputs: Mapping[str, Array], into: InputBuffers) -> None:
    """What clients send is what the model takes."""
    for name, array in inputs.items():
        into[name] = array


def same_outputs(outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """What the model gives is what clients get."""
    return outputs


async def later(outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """No plain function."""
    return outputs


def slow_preprocess(inputs: Mapping[str, Array], into: InputBuffers) -> None:
    """What clients send is what the model takes, with a pause for each row."""
    for name, array in inputs.items():
        for row, value in enumerate(array):
            time.sleep(0.001)
            into[name][row] = value


def pausing_outputs(outputs: Mapping[str, Array]) -> Mapping[str, Array]:
    """What the model gives, 100 ms later: batches that take as long on any machine."""
    time.sleep(0.1)
    return outputs
