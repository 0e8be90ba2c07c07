"""Targets: what comes through Redis and Celery."""

from __future__ import annotations

import base64
import io
import json
import math
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
from celery import Celery
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from rich.console import Console

from producer.bell import bell_message
from producer.catalog import read_published
from producer.commands.tables import models_table, status_tables
from producer.entries import entry_of, known_mark
from producer.errors import CorruptMessage, TrtqError
from producer.inputs import prepare, to_arrays
from producer.spec import ModelSpec, TensorSpec
from producer.status import Status, read_report
from producer.task import InferenceTask, Reply, RowError, RowReference, Tensor
from producer.wire import decode_replies, decode_task, encode_reply, encode_task
from tests.fuzz.judge import Target
from workers.incidents import Incidents
from workers.intake import Intake
from workers.messages import check_message
from workers.metrics import Counters
from workers.models import ModelConfig
from workers.runtime import Runtime
from workers.settings import WorkerSettings
from workers.stages import Stages
from workers.tasks import register

SPEC = ModelSpec(
    name="m",
    inputs=(
        TensorSpec(name="x", dtype="float32", shape=(2, None)),
        TensorSpec(name="flag", dtype="bool", shape=()),
    ),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(2,)),),
    max_batch=8,
    max_rows_per_task=8,
    forbid_nan=True,
)
_X = Tensor("x", "float32", (2, 2, 3), np.ones((2, 2, 3), np.float32).tobytes())
_FLAG = Tensor("flag", "bool", (2,), b"\0\1")
_ROWS = InferenceTask("client-1f", 2, (_X, _FLAG), None, 1000, 60, {"traceparent": "00-1"})
_FILES = InferenceTask(
    "client-20",
    2,
    (),
    RowReference((("x", "/a.npy"), ("flag", "/b.npy")), (("y", "/c.npy"),), 4, 6),
)
_TASKS = [encode_task(_ROWS), encode_task(_FILES)]
_REPLIES = [
    encode_reply(Reply("client-1f", outputs=(Tensor("y", "float32", (1, 2), bytes(8)),))),
    encode_reply(Reply("client-1f", outputs=(_X, _FLAG))),
    encode_reply(Reply("client-20", row_errors=tuple(RowError(i, "c", "m") for i in range(9)))),
    encode_reply(Reply("client-20", error_code="cancelled", error_message="gone")),
    encode_reply(Reply("client-21", stored_as="client-20")),
]


def _nested_arrays(head: bytes) -> list[bytes]:
    """Few bytes that stand for many objects, at the sizes that messages have."""
    return [
        head + body
        for size in (100, 10_000, 200_000, 1 << 20)
        for body in (
            b"\x91" * size,
            b"\xdd\x00\x0f\xff\xff" * (size // 5),
            b"\xdc\x01\x00" * (size // 3),
            b"\xdd" + (size - 5).to_bytes(4, "big") + b"\x80" * (size - 5),
            b"\xdc\x01\x00" + (b"\xdc\x00\xff" + b"\x80" * 255) * (size // 258),
            b"\xdc\x01\x00" + (b"\xdc\x00\xff" + b"\x91\xc0" * 255) * (size // 513),
            b"\xdf\x00\xff\xff\xff" + b"\xa1a\xc0" * (size // 3),
            b"\xdb" + (size - 5).to_bytes(4, "big") + b"a" * (size - 5),
            b"\xc6" + (size - 5).to_bytes(4, "big") + b"a" * (size - 5),
            b"\xc9" + (size - 6).to_bytes(4, "big") + b"\x05" + b"a" * (size - 6),
        )
    ]


def _task(data: bytes) -> None:
    task = decode_task(data)
    assert decode_task(encode_task(task)) == task


def _replies(data: bytes) -> None:
    for reply in decode_replies(data):
        assert list(decode_replies(encode_reply(reply))) == [reply]
        if not reply.outputs:
            continue
        for single in (False, True):
            try:
                to_arrays(reply.outputs, single=single)
            except TrtqError:
                continue


def _pairs(data: bytes) -> list[bytes]:
    """Names and values of a stream entry: each two bytes of length, then so many bytes."""
    found = []
    while len(data) > 2:
        size = int.from_bytes(data[:2], "big")
        found.append(data[2 : 2 + size])
        data = data[2 + size :]
    return found[: len(found) // 2 * 2]


def _fields(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(2, "big") + text for text in texts)


def _intake(data: bytes) -> None:
    deliveries = data[0] % 8 if data else 0
    entry = entry_of(1, (b"1000-0", _pairs(data[1:])))._replace(deliveries=deliveries)
    counters = Counters()
    intake = Intake(
        SPEC,
        counters,
        Stages(),
        Incidents("m", counters),
        lambda: 0.0,
        bulk_allowed=bool(deliveries & 1),
        max_deliveries=3,
    )
    try:
        admitted = intake.admit([entry], 1500)
    except TrtqError as failure:
        raise AssertionError("admit never raises for what an entry holds") from failure
    assert len(admitted.held) + len(admitted.settlements) == 1
    for held in admitted.held:
        for tensor in held.task.inputs:
            np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
    for settlement in admitted.settlements:
        if settlement.reply:
            (reply,) = decode_replies(settlement.reply)
            assert len(reply.error_message) < 10_000


def _console() -> Console:
    return Console(file=io.StringIO(), width=200)


def _spec(data: bytes) -> None:
    name, _, raw = data.partition(b"\n")
    published = read_published({name: raw, b"m": SPEC.model_dump_json().encode()})
    assert SPEC in published.specs or name == b"m"
    assert all(len(text) < 10_000 for text in published.unreadable)
    for spec in published.specs:
        if spec == SPEC:
            continue
        _console().print(models_table([spec]))
        for tensor in spec.inputs + spec.outputs:
            assert np.dtype(tensor.dtype).itemsize * math.prod(s or 1 for s in tensor.shape) >= 0


def _report(data: bytes) -> None:
    _console().print(status_tables(Status({}, [read_report(data)])))


class _Client:
    """Takes what `trtq.infer` hands over as far as bytes for the wire."""

    def submit(self, model: str, inputs: Any, **options: Any) -> Any:
        prepare(SPEC, inputs)
        return SimpleNamespace(result=lambda: np.zeros(2))


_BELL = json.loads(bell_message("m", "work"))
_JSON = {"application/json"}
_APP = Celery("fuzz", set_as_current=False)
_RUNTIME = Runtime(WorkerSettings(), "fuzz", list[ModelConfig](), print, lambda: False)
register(_APP, SimpleNamespace(client=_Client(), runtime=_RUNTIME))  # type: ignore[arg-type]


def _celery(data: bytes) -> None:
    """Arguments of both Celery tasks as JSON, and one of them as what a base64 text holds."""
    infer, serve = _APP.tasks["trtq.infer"].run, _APP.tasks["trtq.serve"].run
    text = base64.b64encode(data).decode()
    for inputs in ({"x": text, "flag": [True]}, text):
        try:
            infer("m", inputs)
        except TrtqError:
            continue
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    summary = serve(given, given)
    assert "error" in summary
    assert len(summary["error"]) < 10_000
    infer("m", given)
    infer(given, "m")


class _Channel:
    """What kombu asks of a channel while it reads a message."""

    def decode_body(self, body: Any, encoding: Any) -> Any:
        return base64.b64decode(body) if encoding else body


def _message(data: bytes) -> None:
    """Bytes in a Celery queue, up to the call of a task that Celery is given."""
    try:
        message = virtual.Message(loads(bytes_to_str(data)), _Channel(), accept=_JSON)
    except Exception as failure:
        # The consumer drops whatever kombu cannot read, by whatever it raises.
        raise CorruptMessage(type(failure).__name__) from None
    check_message(message, ("trtq.serve", "trtq.infer"))
    args, kwargs, _ = message.payload
    assert isinstance(args, list)
    assert isinstance(kwargs, dict)


def _with_body(body: bytes) -> bytes:
    return json.dumps({**_BELL, "body": base64.b64encode(body).decode()}).encode()


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


TARGETS = [
    Target(
        "task frame",
        _task,
        lambda: [*_TASKS, msgpack.packb([2, "client-1", {"new": True}])],
        lambda: _nested_arrays(b"") + _nested_arrays(_TASKS[0][:20]),
        100,
    ),
    Target(
        "reply frames",
        _replies,
        lambda: [*_REPLIES, b"".join(_REPLIES)],
        lambda: _nested_arrays(b"")
        + _nested_arrays(b"\x94\x01\xa3a-1\x00")
        + _nested_arrays(b"\x94\x01\xa3a-1\x01")
        + [b"\x94\x01\xa3a-1\x01\xdd\x00\x0f\xff\xff" + b"\x93\x00\xa0\xa0" * 20_000],
        100,
    ),
    Target(
        "stream entry",
        _intake,
        lambda: [bytes([n]) + _fields(b"r", b"2", b"d", task) for n in (0, 1) for task in _TASKS],
        lambda: [
            b"\0" + _fields(b"d", body[:60_000], b"r", b"9" * 60_000)
            for body in _nested_arrays(_TASKS[0][:20])
        ],
        100,
    ),
    Target(
        "cancellation mark",
        known_mark,
        lambda: [b"1:1700000000000-0", b"0:1-1"],
        lambda: [b"9" * 100_000 + b":1-0", b":" * 100_000, b"\xff" * 1000],
        8,
    ),
    Target(
        "published model",
        _spec,
        lambda: [name + SPEC.model_dump_json().encode() for name in (b"m\n", b"n\n")],
        lambda: [
            b"m\n" + b"[" * 100_000,
            b"x" * 100_000 + b"\n{}",
            b"m\n" + SPEC.model_dump_json().replace("[]", "[" + "1," * 50_000 + "1]").encode(),
            b"m\n" + SPEC.model_dump_json().replace("8", "8" * 5000).encode(),
        ],
        200,
    ),
    Target(
        "worker report",
        _report,
        lambda: [
            json.dumps(
                {
                    "name": "cpu@h.1", "node": "cpu@h", "host": "h", "device": "cpu", "pid": 7,
                    "models": ["m", "n"], "tasks": 5, "rows": 9, "batches": 2, "failed": 0,
                    "expired": 0, "tasks_per_s": 1.5, "rows_per_s": 2.5, "started": 1.5,
                }
            ).encode()
        ],
        lambda: [
            b"[" * 100_000,
            b'{"name": "[/red]\\u001b[2J", "models": [' + b'"a",' * 9_000 + b'"a"]}',
            b'{"name": "w", "tasks": ' + b"9" * 5000 + b"}",
            b'{"name": "w", "x": {' + b",".join(b'"%d":{}' % i for i in range(20_000)) + b"}}",
        ],
        200,
    ),
    Target(
        "celery message",
        _message,
        lambda: [
            bell_message("m", "work"),
            _with_body(b'[["m", [[1, 2]]], {"priority": "high"}, {"chain": null}]'),
            json.dumps({**_BELL, "headers": {**_BELL["headers"], "task": "trtq.infer"}}).encode(),
        ],
        lambda: [
            b"[" * 100_000,
            _with_body(b"[" * 100_000),
            _with_body(b'[[{"__type__": "decimal", "__value__": "9e999999999"}], {}, {}]'),
            _with_body(b"[[" + b"[]," * 50_000 + b"[]], {}, {}]"),
            json.dumps({**_BELL, "headers": {"task": "x" * 100_000, "id": "y" * 100_000}}).encode(),
        ],
        200,
    ),
    Target(
        "celery arguments",
        _celery,
        lambda: [
            _npy(np.ones((1, 2, 3), np.float32)),
            b'{"x": [[1, 2.5], [3, 4]], "flag": true}',
            b'{"x": "AAAA", "flag": [1, 9007199254740993]}',
            b'["m", "n"]',
        ],
        lambda: [
            b"[" * 900 + b"]" * 900,
            b'{"x":' * 900 + b"1" + b"}" * 900,
            b'{"flag": true, "x": ["' + b"a" * 100_000 + b'"' + b',""' * 30_000 + b"]}",
            b'{"flag": true, "x": [' + b"[]," * 30_000 + b"[]]}",
            _npy(np.ones(2)).replace(b"(2,)", b"(99999999999,)"),
        ],
        200,
    ),
]  # fmt: skip
