"""The wire format: golden frames of version 1, round trips, and bytes that are no message."""

from __future__ import annotations

import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.errors import CorruptMessage, UnsupportedVersion, WireError
from producer.spec import DTYPES
from producer.task import InferenceTask, Reply, RowError, RowReference, Tensor, client_of
from producer.wire import decode_replies, decode_task, encode_reply, encode_task, sender_of

# Written by hand from the format's description: these bytes never change.
TASK_FRAME = (
    b"\x98\x01\xa9client-1f\x00\x02\xcd\x03\xe8\x00"
    b"\x91\x94\xa1x\xa5uint8\x92\x02\x03\xc4\x06\x00\x01\x02\x03\x04\x05\xc0"
)
TASK = InferenceTask(
    "client-1f", 2, (Tensor("x", "uint8", (2, 3), b"\0\1\2\3\4\5"),), None, 1000, 0, None
)
REFERENCE_FRAME = (
    b"\x98\x01\xa9client-20\x01\x02\x00\x00"
    b"\x94\x91\x92\xa1x\xa4/a.n\x91\x92\xa1y\xa4/b.n\x04\x06\x81\xa1t\xa11"
)
REFERENCE = InferenceTask(
    "client-20",
    2,
    (),
    RowReference((("x", "/a.n"),), (("y", "/b.n"),), 4, 6),
    trace={"t": "1"},
)
REPLY_FRAME = b"\x94\x01\xa9client-1f\x00\x91\x94\xa1y\xa4bool\x91\x01\xc4\x01\x01"
REPLY = Reply("client-1f", outputs=(Tensor("y", "bool", (1,), b"\1"),))
ROWS_FRAME = b"\x94\x01\xa9client-20\x01\x91\x93\x05\xa1c\xa1m"
ROWS = Reply("client-20", row_errors=(RowError(5, "c", "m"),))
ERROR = Reply("client-1f", error_code="cancelled", error_message="gone")


@pytest.mark.parametrize(
    ("task", "frame"), [(TASK, TASK_FRAME), (REFERENCE, REFERENCE_FRAME)], ids=["rows", "reference"]
)
def test_golden_tasks(task: InferenceTask, frame: bytes) -> None:
    assert encode_task(task) == frame
    assert decode_task(frame) == task


@pytest.mark.parametrize(("reply", "frame"), [(REPLY, REPLY_FRAME), (ROWS, ROWS_FRAME)])
def test_golden_replies(reply: Reply, frame: bytes) -> None:
    assert encode_reply(reply) == frame
    assert list(decode_replies(frame)) == [reply]


def test_golden_error() -> None:
    frame = b"\x94\x01\xa9client-1f\x02\x92\xa9cancelled\xa4gone"
    assert encode_reply(ERROR) == frame
    assert list(decode_replies(frame + REPLY_FRAME)) == [ERROR, REPLY]


def test_the_client_is_inside_the_task_id() -> None:
    assert client_of("name.0a1b-1f") == "name.0a1b"
    assert client_of("a-b.0a1b-1f") == "a-b.0a1b"


def test_a_newer_version_names_its_sender() -> None:
    newer = msgpack.packb([2, "client-1", {"unknown": True}])
    with pytest.raises(UnsupportedVersion, match="version 2"):
        decode_task(newer)
    assert sender_of(newer) == "client-1"
    with pytest.raises(UnsupportedVersion):
        list(decode_replies(newer))


def test_a_truncated_frame_names_its_sender() -> None:
    for length in range(len(TASK_FRAME)):
        with pytest.raises(CorruptMessage):
            decode_task(TASK_FRAME[:length])
        assert sender_of(TASK_FRAME[:length]) == ("client-1f" if length >= 12 else None)


@pytest.mark.parametrize("length", range(1, len(REPLY_FRAME)))
def test_a_truncated_reply_is_an_error(length: int) -> None:
    with pytest.raises(CorruptMessage):
        list(decode_replies(REPLY_FRAME[:length]))


def broken(**changes: object) -> bytes:
    fields = {
        "version": 1,
        "task_id": "client-1",
        "kind": 0,
        "rows": 1,
        "ttl_ms": 0,
        "store_s": 0,
        "body": [["x", "uint8", [1, 1], b"a"]],
        "trace": None,
    }
    return bytes(msgpack.packb(list({**fields, **changes}.values())))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([]),
        msgpack.packb([1]),
        msgpack.packb([1, "client-1"]),
        broken(version="1"),
        broken(version=True),
        broken(task_id="nodash"),
        broken(task_id="x" * 300 + "-1"),
        broken(kind=9),
        broken(rows=-1),
        broken(rows=2**60),
        broken(rows=1.5),
        broken(ttl_ms=None),
        broken(trace=[1]),
        broken(trace={"a": 1}),
        broken(body=[]),
        broken(body=None),
        broken(body=[["x", "uint8", [1, 1], "text"]]),
        broken(body=[["x", "uint8", [1, 2], b"a"]]),
        broken(body=[["x", "uint8", [-1, -1], b"a"]]),
        broken(body=[["x", "uint8", [2**40, 2**40], b"a"]]),
        broken(body=[["x", "object", [1], b"12345678"]]),
        broken(body=[["x", ["uint8"], [1], b"a"]]),
        broken(body=[["x", "uint8", [1] * 40, b"a"]]),
        broken(body=[["x", "uint8", [1]]]),
        broken(kind=1, body=[[], [], 0]),
        broken(kind=1, body=[[["x", 1]], [], 0, 1]),
        broken(kind=1, body=[[], [], -1, 1]),
        msgpack.packb([1, "client-1", 0, 1, 0, 0, msgpack.ExtType(4, b"a"), None]),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\x01",
        TASK_FRAME + b"\x00",
    ],
)
def test_no_task(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_task(frame)


@pytest.mark.parametrize(
    "fields",
    [
        [1, "client-1"],
        [1, "client-1", 5, None],
        [1, "client-1", 2, ["only code"]],
        [1, "client-1", 2, [1, 2]],
        [1, "client-1", 1, 3],
        [1, "client-1", 1, [["row", "c", "m"]]],
        [1, "client-1", 1, [[1, 2, "m"]]],
        [1, "client-1", 0, []],
    ],
)
def test_no_reply(fields: list[object]) -> None:
    with pytest.raises(WireError):
        list(decode_replies(msgpack.packb(fields)))


def test_a_newer_version_may_hold_anything() -> None:
    for body in (
        {"k": [1] * 1000},
        msgpack.ExtType(4, b"a"),
        msgpack.Timestamp(1),
        [[0] * 1000] * 9,
    ):
        newer = msgpack.packb([2, "client-1", body])
        with pytest.raises(UnsupportedVersion):
            decode_task(newer)


def test_a_message_with_more_arrays_than_any_has() -> None:
    # 300 kB: large ones are counted while they are decoded.
    inner = b"\xdc\x00\xff" + b"\x92\xc0\xc0" * 255
    frame = b"\x98\x01\xa8client-1\x00\x01\x00\x00\xdc\x01\x00" + inner * 256 + b"\xc0"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptMessage, match="more than 1024 arrays"):
            decode_task(frame + bytes(300_000))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [100, 10_000, 1 << 20, 16 << 20])
@pytest.mark.parametrize(
    "unit",
    [b"\xdd\x00\x0f\xff\xff", b"\xdc\x01\x00", b"\xdd\xff\xff\xff\xff", b"\x91", b"\x80", b"\xc0"],
)
def test_memory_is_bounded_by_the_message(size: int, unit: bytes) -> None:
    for head in (b"", TASK_FRAME[:18], b"\x94\x01\xa3a-1\x00", b"\x94\x01\xa3a-1\x01"):
        frame = (head + b"\xdc\x00\xff" + unit * (size // len(unit)))[:size]
        tracemalloc.start()
        try:
            for decode in (decode_task, lambda blob: list(decode_replies(blob))):
                with pytest.raises(WireError):
                    decode(frame)
            sender_of(frame)
            assert tracemalloc.get_traced_memory()[1] < min(100 * size, 32 << 20) + size + (3 << 20)
        finally:
            tracemalloc.stop()


def test_many_row_errors() -> None:
    reply = Reply("a-1", row_errors=tuple(RowError(n, "c", "m" * 50) for n in range(10_000)))
    blob = encode_reply(reply) + encode_reply(ERROR)
    assert list(decode_replies(blob)) == [reply, ERROR]


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "k" * 1_000_000},
        {"kind": b"k" * 1_000_000},
        {"body": [["x" * 1_000_000, "uint8", [1, 1], b"a"]]},
        {"body": [["x" * 1_000_000, "uint8", [-1], b"a"]]},
        {"body": [["x", "uint8", [2**64 - 1] * 100, b"a"]]},
        {"kind": 1, "body": [[["x", "/" + "p" * 5000]], [["y", "/b.n"]], 0, 1]},
        {"body": [["x", "uint8", [0, 2**63], b""]]},
    ],
)
def test_messages_quote_a_few_characters_only(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptMessage) as refused:
        decode_task(broken(**changes))
    assert len(refused.value.message) < 2000


@given(st.binary(max_size=300))
def test_garbage_is_a_wire_error(frame: bytes) -> None:
    try:
        decode_task(frame)
    except WireError:
        pass
    sender_of(frame)


@given(st.data())
def test_a_flipped_byte_never_escapes(data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from([TASK_FRAME, REFERENCE_FRAME])))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] = data.draw(st.integers(0, 255))
    try:
        decode_task(bytes(frame))
    except WireError:
        pass


tensors = st.builds(
    lambda name, dtype, shape: Tensor(name, dtype, tuple(shape), np.zeros(shape, dtype).tobytes()),
    st.text(min_size=1, max_size=10),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 4), max_size=4),
)


@given(
    st.lists(tensors, min_size=1, max_size=3),
    st.integers(0, 2**40),
    st.integers(0, 2**20),
    st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_round_trip(
    inputs: list[Tensor], ttl_ms: int, store_s: int, trace: dict[str, str] | None
) -> None:
    task = InferenceTask("c-1", 1, tuple(inputs), None, ttl_ms, store_s, trace)
    assert decode_task(encode_task(task)) == task
    reply = Reply("c-1", outputs=tuple(inputs))
    assert list(decode_replies(encode_reply(reply) * 2)) == [reply, reply]
