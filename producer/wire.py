"""Bytes to and from `InferenceTask` and `Reply`: versioned msgpack arrays, tensors as raw bytes.

Every version starts with the same two elements, [version, task_id, ...], so a reader can always
name the sender of a message that it cannot read otherwise. Version 1 goes on:

    task   kind (0 rows inside, 1 rows by reference), rows, ttl_ms, store_s, body, trace
    reply  status (0 rows inside, 1 rows by reference, 2 error), body

A tensor is [name, dtype, shape, data]. Nothing here can run code: no pickle, no extension types.

Bytes are decoded under limits, since a byte of msgpack may become an object of 90: garbage takes at
most about 100 times its length and never more than its length and some 30 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import msgpack

from producer.errors import CorruptMessage, UnsupportedVersion
from producer.quote import quoted
from producer.spec import DTYPES, MAX_RANK, MAX_TENSORS
from producer.task import InferenceTask, Reply, RowError, RowReference, Tensor

VERSION = 1
_INSIDE, _REFERENCE, _ERROR = 0, 1, 2
_ITEM_BYTES = {
    name: int("".join(c for c in name if c.isdigit()) or 8) // 8 for name in sorted(DTYPES)
}
_MAX_BYTES = 2**62
#: Longest path that Linux opens; longer names of tensors nobody has.
_MAX_NAME = 4096

# An array is allocated as long as it says it is, before its elements are read.
_LIMITS: dict[str, Any] = {
    "raw": False,
    "use_list": False,
    "strict_map_key": True,
    "max_array_len": MAX_TENSORS,
    "max_map_len": 64,
    "max_ext_len": 0,
}
_HEAD_LIMITS = {**_LIMITS, "max_array_len": 0, "max_map_len": 0}
#: Below this many bytes counting arrays costs more than garbage could.
_COUNT_FROM_BYTES = 256 << 10
_MAX_CONTAINERS = 4 * MAX_TENSORS


class _Budget:
    """Counts arrays and maps of one message; raises CorruptMessage at more than any may have."""

    def __init__(self) -> None:
        self.left = _MAX_CONTAINERS

    def __call__(self, container: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise CorruptMessage(f"a message of more than {_MAX_CONTAINERS} arrays and maps")
        return container


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
    if type(fields) is not tuple or len(fields) < 2:
        raise CorruptMessage("no array of at least two elements")
    _check_head(fields[0], fields[1])
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
    raise CorruptMessage(f"task {task_id} has unknown kind {quoted(kind)}")


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
    budget = _Budget()
    if len(blob) < _COUNT_FROM_BYTES:
        unpacker = msgpack.Unpacker(max_buffer_size=len(blob) or 1, **_LIMITS)
    else:
        unpacker = msgpack.Unpacker(
            max_buffer_size=len(blob), list_hook=budget, object_hook=budget, **_LIMITS
        )
    unpacker.feed(blob)
    whole = 0
    while True:
        try:
            reply = _reply(unpacker, budget)
        except msgpack.OutOfData:
            if whole != len(blob):
                raise CorruptMessage("a reply is truncated") from None
            return
        except (ValueError, msgpack.UnpackException) as failure:
            raise CorruptMessage(f"a reply is no msgpack: {_said(failure)}") from None
        whole = unpacker.tell()
        yield reply


def sender_of(frame: bytes) -> str | None:
    """The task id in the first two elements of any version's frame, also of a truncated one."""
    task_id = _head(frame)[1]
    return task_id if _is_task_id(task_id) else None


def _head(frame: bytes) -> tuple[Any, Any]:
    """The first two elements where they can be read, else None."""
    unpacker = msgpack.Unpacker(max_buffer_size=512, **_HEAD_LIMITS)
    version = None
    try:
        unpacker.feed(frame[:512])
        if unpacker.read_array_header() < 2:
            return None, None
        version = unpacker.unpack()
        return version, unpacker.unpack() if type(version) is int else None
    except (ValueError, msgpack.UnpackException):
        return version, None


def _reply(unpacker: Any, budget: _Budget) -> Reply:
    # Field by field: only row errors may be many, and what else is an array is known to be short.
    count = unpacker.read_array_header()
    budget.left = _MAX_CONTAINERS
    if count < 2:
        raise CorruptMessage("no array of at least two elements")
    task_id = _check_head(unpacker.unpack(), unpacker.unpack())
    if count != 4:
        raise CorruptMessage(f"a reply has 4 fields, this one {count}")
    status = unpacker.unpack()
    if status == _INSIDE:
        return Reply(task_id, outputs=_tensors(unpacker.unpack()))
    if status == _REFERENCE:
        errors = []
        for _ in range(unpacker.read_array_header()):
            budget.left = _MAX_CONTAINERS
            errors.append(_row_error(unpacker.unpack()))
        return Reply(task_id, row_errors=tuple(errors))
    if status == _ERROR:
        body = unpacker.unpack()
        if _is_texts(body, 2) and body[0]:
            return Reply(task_id, error_code=body[0], error_message=body[1])
        raise CorruptMessage(f"the error for {task_id} is not [code, message]")
    raise CorruptMessage(f"reply to {task_id} has unknown status {quoted(status)}")


def _unpack(frame: bytes) -> Any:
    try:
        if len(frame) < _COUNT_FROM_BYTES:
            return msgpack.unpackb(frame, **_LIMITS)
        budget = _Budget()
        return msgpack.unpackb(frame, list_hook=budget, object_hook=budget, **_LIMITS)
    except (ValueError, msgpack.UnpackException, RecursionError, CorruptMessage) as failure:
        version, task_id = _head(frame)
        if _is_task_id(task_id):
            # A newer version's body may hold what this one's may not.
            _check_head(version, task_id)
        if isinstance(failure, CorruptMessage):
            raise
        raise CorruptMessage(f"no msgpack: {_said(failure)}") from None


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__} {str(failure)[:200]}"


def _check_head(version: Any, task_id: Any) -> str:
    if type(version) is not int or not _is_task_id(task_id):
        raise CorruptMessage("the first two elements are no version and task id")
    if version != VERSION:
        raise UnsupportedVersion(
            f"message of wire version {version}; this side reads version {VERSION}: "
            "upgrade the older side"
        )
    found: str = task_id
    return found


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
                raise CorruptMessage(f"tensor {quoted(name)} has shape {quoted(shape)}")
    except (ValueError, TypeError, KeyError):
        raise CorruptMessage("a tensor is not [name, dtype, shape, data]") from None
    if len(name) > _MAX_NAME or len(shape) > MAX_RANK or prod(shape) * item_bytes != len(data):
        raise CorruptMessage(
            f"tensor {quoted(name)} of {dtype} and shape {quoted(shape)} has {len(data)} bytes"
        )
    if not data and prod(size or 1 for size in shape) * item_bytes > _MAX_BYTES:
        # Without elements, and still more than numpy can address.
        raise CorruptMessage(f"tensor {quoted(name)} has shape {quoted(shape)}")
    return Tensor(name, dtype, shape, data)


def _reference(body: Any) -> RowReference:
    if type(body) is tuple and len(body) == 4:
        inputs, outputs, start, stop = body
        named = isinstance(inputs, tuple) and isinstance(outputs, tuple)
        if (
            named
            and all(_is_texts(pair, 2) for pair in inputs + outputs)
            and all(len(text) <= _MAX_NAME for pair in inputs + outputs for text in pair)
            and _is_count(start)
            and _is_count(stop)
        ):
            return RowReference(inputs, outputs, start, stop)
    raise CorruptMessage("a row reference is not [inputs, outputs, start, stop]")


def _row_error(item: Any) -> RowError:
    if not (isinstance(item, tuple) and len(item) == 3 and _is_count(item[0])):
        raise CorruptMessage("a row error is not [row, code, message]")
    if not _is_texts(item[1:], 2):
        raise CorruptMessage("a row error is not [row, code, message]")
    return RowError(*item)
