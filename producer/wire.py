"""Bytes to and from `InferenceTask` and `Reply`: versioned msgpack arrays, tensors as raw bytes.

Every version starts with the same two elements, [version, task_id, ...], so a reader can always
name the sender of a message that it cannot read otherwise. Version 1 goes on:

    task   kind (0 rows inside, 1 rows by reference), rows, ttl_ms, store_s, body, trace
    reply  status (0 rows inside, 1 rows by reference, 2 error), body

A tensor is [name, dtype, shape, data]. Nothing here can run code: no pickle, no extension types.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import msgpack

from producer.errors import CorruptMessage, UnsupportedVersion
from producer.spec import DTYPES
from producer.task import InferenceTask, Reply, RowError, RowReference, Tensor

VERSION = 1
_INSIDE, _REFERENCE, _ERROR = 0, 1, 2
_ITEM_BYTES = {
    name: int("".join(c for c in name if c.isdigit()) or 8) // 8 for name in sorted(DTYPES)
}
_MAX_RANK = 32


def encode_task(task: InferenceTask) -> bytes:
    """One frame, to be stored as it is in a stream entry."""
    kind, body = (_INSIDE, task.inputs) if task.reference is None else (_REFERENCE, task.reference)
    frame: bytes = msgpack.packb(
        (VERSION, task.task_id, kind, task.rows, task.ttl_ms, task.store_s, body, task.trace)
    )
    return frame


def decode_task(frame: bytes) -> InferenceTask:
    """The task in `frame`, its sizes checked; tensor data are bytes inside no larger buffer.

    Raises UnsupportedVersion for a newer version and CorruptMessage for anything else that is
    no task. `sender_of` may still find who to tell.
    """
    fields = _unpack(frame)
    _check_head(fields)
    try:
        _, task_id, kind, rows, ttl_ms, store_s, body, trace = fields
    except ValueError:
        raise CorruptMessage(f"a task has 8 fields, this one {len(fields)}") from None
    if not (_is_count(rows) and _is_count(ttl_ms) and _is_count(store_s)):
        raise CorruptMessage(f"rows, ttl_ms or store_s of task {task_id} is no count")
    if trace is not None and not _is_text_map(trace):
        raise CorruptMessage(f"trace of task {task_id} is no map of text to text")
    if kind == _INSIDE:
        return InferenceTask(task_id, rows, _tensors(body), None, ttl_ms, store_s, trace)
    if kind == _REFERENCE:
        return InferenceTask(task_id, rows, (), _reference(body), ttl_ms, store_s, trace)
    raise CorruptMessage(f"task {task_id} has unknown kind {kind!r}")


def encode_reply(reply: Reply) -> bytes:
    """One frame; frames may be joined, since each says where it ends."""
    if reply.error_code:
        status: int = _ERROR
        body: Any = (reply.error_code, reply.error_message)
    elif reply.outputs:
        status, body = _INSIDE, reply.outputs
    else:
        status, body = _REFERENCE, reply.row_errors
    frame: bytes = msgpack.packb((VERSION, reply.task_id, status, body))
    return frame


def decode_replies(blob: bytes) -> Iterator[Reply]:
    """The replies in `blob`, one frame after the other.

    Raises CorruptMessage or UnsupportedVersion at the first frame that is no reply.
    """
    unpacker = msgpack.Unpacker(
        raw=False, use_list=False, strict_map_key=True, max_buffer_size=max(1, len(blob))
    )
    unpacker.feed(blob)
    whole = 0
    while True:
        try:
            fields = unpacker.unpack()
        except msgpack.OutOfData:
            if whole != len(blob):
                raise CorruptMessage("a reply is truncated") from None
            return
        except (ValueError, msgpack.UnpackException) as failure:
            raise CorruptMessage(f"a reply is no msgpack: {failure}") from None
        whole = unpacker.tell()
        yield _reply(fields)


def sender_of(frame: bytes) -> str | None:
    """The task id in the first two elements of any version's frame, also of a truncated one."""
    unpacker = msgpack.Unpacker(raw=False, max_buffer_size=4096)
    try:
        unpacker.feed(frame[:512])
        if unpacker.read_array_header() < 2 or not isinstance(unpacker.unpack(), int):
            return None
        task_id = unpacker.unpack()
    except (ValueError, msgpack.UnpackException):
        return None
    return task_id if _is_task_id(task_id) else None


def _reply(fields: Any) -> Reply:
    _check_head(fields)
    try:
        _, task_id, status, body = fields
    except ValueError:
        raise CorruptMessage(f"a reply has 4 fields, this one {len(fields)}") from None
    if status == _INSIDE:
        return Reply(task_id, outputs=_tensors(body))
    if status == _REFERENCE:
        return Reply(task_id, row_errors=_row_errors(body))
    if status == _ERROR and _is_texts(body, 2):
        return Reply(task_id, error_code=body[0], error_message=body[1])
    raise CorruptMessage(f"reply to {task_id} has unknown status {status!r}")


def _unpack(frame: bytes) -> Any:
    try:
        return msgpack.unpackb(frame, raw=False, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as failure:
        raise CorruptMessage(f"no msgpack: {type(failure).__name__} {failure}") from None
    except RecursionError:
        raise CorruptMessage("msgpack nested too deeply") from None


def _check_head(fields: Any) -> None:
    if not isinstance(fields, tuple) or len(fields) < 2:
        raise CorruptMessage("no array of at least two elements")
    version, task_id = fields[0], fields[1]
    if type(version) is not int or not _is_task_id(task_id):
        raise CorruptMessage("the first two elements are no version and task id")
    if version != VERSION:
        raise UnsupportedVersion(
            f"message of wire version {version}; this side reads version {VERSION}: "
            "upgrade the older side"
        )


def _is_task_id(value: object) -> bool:
    return isinstance(value, str) and 3 <= len(value) <= 200 and "-" in value[1:]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_texts(value: object, length: int) -> bool:
    return isinstance(value, tuple) and len(value) == length and all(type(v) is str for v in value)


def _is_text_map(value: object) -> bool:
    return isinstance(value, dict) and all(type(v) is str for v in value.values())


def _tensors(body: Any) -> tuple[Tensor, ...]:
    if type(body) is not tuple or not body:
        raise CorruptMessage("no array of tensors")
    return tuple([_tensor(item) for item in body])


def _tensor(item: Any) -> Tensor:
    try:
        name, dtype, shape, data = item
        item_bytes = _ITEM_BYTES[dtype]
        if type(name) is not str or type(data) is not bytes or type(shape) is not tuple:
            raise CorruptMessage("a tensor is not [name, dtype, shape, data]")
        for size in shape:
            if type(size) is not int or size < 0:
                raise CorruptMessage(f"tensor {name!r} has shape {shape}")
    except (ValueError, TypeError, KeyError):
        raise CorruptMessage("a tensor is not [name, dtype, shape, data]") from None
    if len(shape) > _MAX_RANK or prod(shape) * item_bytes != len(data):
        raise CorruptMessage(
            f"tensor {name!r} of {dtype} and shape {shape[:_MAX_RANK]} has {len(data)} bytes"
        )
    return Tensor(name, dtype, shape, data)


def _reference(body: Any) -> RowReference:
    if type(body) is tuple and len(body) == 4:
        inputs, outputs, start, stop = body
        named = isinstance(inputs, tuple) and isinstance(outputs, tuple)
        if (
            named
            and all(_is_texts(pair, 2) for pair in inputs + outputs)
            and _is_count(start)
            and _is_count(stop)
        ):
            return RowReference(inputs, outputs, start, stop)
    raise CorruptMessage("a row reference is not [inputs, outputs, start, stop]")


def _row_errors(body: Any) -> tuple[RowError, ...]:
    if not isinstance(body, tuple):
        raise CorruptMessage("row errors are no array")
    for item in body:
        if not (isinstance(item, tuple) and len(item) == 3 and _is_count(item[0])):
            raise CorruptMessage("a row error is not [row, code, message]")
        if not _is_texts(item[1:], 2):
            raise CorruptMessage("a row error is not [row, code, message]")
    return tuple(RowError(*item) for item in body)
