"""The GPU that this process uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from producer.errors import MissingExtra, NoDevice


class Device(NamedTuple):
    """A GPU as CUDA describes it. `ordinal` counts the devices that the process may see."""

    ordinal: int
    name: str
    uuid: str
    compute_capability: tuple[int, int]
    total_memory_bytes: int


@contextmanager
def opened_cuda() -> Iterator[Any]:
    """The module pycuda.driver, initialised; so never before a fork.

    Raises MissingExtra without PyCUDA, and NoDevice for what CUDA refuses in the block too.
    """
    try:
        import pycuda.driver as cuda
    except ImportError as failure:
        raise MissingExtra(
            f"TensorRT models need PyCUDA ({failure}): pip install 'trtq[gpu]'"
        ) from failure
    try:
        cuda.init()
        yield cuda
    except cuda.Error as failure:
        raise NoDevice(
            f"no usable GPU in this process ({failure}): start `trtq worker --devices 0` on a "
            "machine with one, or serve the model with `engine: onnxruntime`"
        ) from failure


def current_device() -> Device:
    """The first device of CUDA_VISIBLE_DEVICES; raises as `opened_cuda`."""
    with opened_cuda() as cuda:
        device = cuda.Device(0)
        major, minor = device.compute_capability()
        return Device(
            0,
            str(device.name()),
            str(device.uuid()) if hasattr(device, "uuid") else "",
            (int(major), int(minor)),
            int(device.total_memory()),
        )
