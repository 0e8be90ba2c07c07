"""Half precision as a conversion of the ONNX model: strongly typed networks have no switch."""

from __future__ import annotations

from typing import Any

from producer.errors import MissingExtra


def to_half(model: Any) -> Any:
    """An onnx.ModelProto that computes in float16 and keeps the dtypes of inputs and outputs.

    Raises MissingExtra without the package onnxconverter-common.
    """
    try:
        from onnxconverter_common.float16 import convert_float_to_float16
    except ImportError as failure:
        raise MissingExtra(
            f"build.fp16 needs onnxconverter-common ({failure}): pip install 'trtq[gpu]' or "
            "'trtq[tensorrt-rtx]'"
        ) from failure
    return convert_float_to_float16(model, keep_io_types=True)
