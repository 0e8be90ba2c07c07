"""An ONNX model as it is given to the builder, with the files that hold its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from producer.errors import MissingExtra, ModelFileError

_CHUNK_BYTES = 1 << 20


class Source(NamedTuple):
    """Serialized ONNX, where it was read, and the external weight files that belong to it."""

    path: Path
    data: bytes
    external: tuple[Path, ...]


def read_source(path: Path) -> Source:
    """Reads an ONNX file; the external files are looked at by `digest` and by the parser only.

    Raises ModelFileError for a file that is missing, is no ONNX model, or whose weight files are
    missing or lie outside its folder; MissingExtra without the package onnx.
    """
    try:
        data = path.read_bytes()
    except OSError as failure:
        raise ModelFileError(f"model file {path} cannot be read: {failure}") from failure
    return Source(path, data, _external_files(path, parse_model(path, data)))


def import_onnx() -> Any:
    """The package onnx; raises MissingExtra without it."""
    try:
        import onnx
    except ImportError as failure:
        raise MissingExtra(
            f"building from ONNX needs the package onnx ({failure}): pip install 'trtq[gpu]' or "
            "'trtq[tensorrt-rtx]'"
        ) from failure
    return onnx


def parse_model(path: Path, data: bytes) -> Any:
    """An onnx.ModelProto without its external weights; raises ModelFileError, MissingExtra."""
    onnx = import_onnx()
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(data)
    except DecodeError as failure:
        raise ModelFileError(f"{path} is no ONNX model: {failure}") from failure
    if not model.graph.node:
        raise ModelFileError(f"{path} is no ONNX model, or one without nodes")
    return model


def digest(source: Source) -> str:
    """sha256, as hex, over the model and its external files, each with its name and length."""
    total = hashlib.sha256()
    total.update(hashlib.sha256(source.data).digest())
    for file in source.external:
        content = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    content.update(chunk)
        except OSError as failure:
            raise ModelFileError(f"weights {file} cannot be read: {failure}") from failure
        total.update(file.name.encode() + b"\0" + content.digest())
    return total.hexdigest()


def _external_files(path: Path, model: Any) -> tuple[Path, ...]:
    folder = path.parent.resolve()
    found: set[Path] = set()
    for tensor in _tensors(model.graph):
        for entry in tensor.external_data:
            if entry.key != "location":
                continue
            file = (folder / entry.value).resolve()
            if not file.is_relative_to(folder) or not file.is_file():
                raise ModelFileError(
                    f"{path} keeps weights in {entry.value!r}, which is no file in its folder "
                    f"{folder}: put it there"
                )
            found.add(file)
    return tuple(sorted(found))


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)
            for inner in attribute.graphs:
                yield from _tensors(inner)
