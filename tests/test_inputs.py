"""What callers hand over becomes exactly that on the wire, or a named error."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.errors import CorruptMessage, WrongDtype, WrongInputName
from producer.inputs import check_tensors, prepare, to_arrays
from producer.spec import ModelSpec, TensorSpec
from producer.task import Tensor


def spec(dtype: str, *shape: int | None) -> ModelSpec:
    tensor = (TensorSpec(name="x", dtype=dtype, shape=shape),)
    return ModelSpec(name="m", inputs=tensor, outputs=tensor, max_batch=64, max_rows_per_task=64)


def sent(dtype: str, value: Any, *shape: int | None) -> Any:
    prepared = prepare(spec(dtype, *shape), value)
    return to_arrays(prepared.tensors, single=prepared.single)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("value", [[2**53 + 1], [2**53 + 1, 0.5], [2**53 + 1, 1.0], [2**64, 1]])
def test_whole_numbers_that_a_float_cannot_hold(dtype: str, value: list[Any]) -> None:
    if dtype == "int64" and value == [2**53 + 1]:
        assert sent(dtype, value, None).tolist() == value
        return
    with pytest.raises(WrongDtype):
        sent(dtype, value, None)


def test_whole_numbers_and_fractions_that_it_can_hold() -> None:
    assert sent("float32", [2**60, 0.1], None).tolist() == [2**60, np.float32(0.1)]
    assert sent("float64", 2**60).tolist() == 2**60
    assert np.isnan(sent("float32", [2**60, float("nan")], None)[1])
    with pytest.raises(WrongDtype):
        sent("float64", 2**53 + 1)


@given(st.lists(st.integers(-(2**64), 2**64) | st.integers(-3, 3), min_size=1, max_size=4))
def test_whole_numbers_arrive_as_they_are_or_not_at_all(value: list[int]) -> None:
    for dtype in ("float32", "float64", "int64", "uint64", "int8"):
        try:
            arrived = sent(dtype, value, None).tolist()
        except WrongDtype:
            continue
        assert [int(number) for number in arrived] == value


def test_a_mask_is_not_lost() -> None:
    masked = np.ma.masked_array(np.ones(2, np.float32), [True, False])
    for value in (masked, [masked, masked]):
        with pytest.raises(WrongDtype, match="mask"):
            sent("float32", value, 2)
    whole = np.ma.masked_array(np.ones(2, np.float32), [False, False])
    assert sent("float32", whole, 2).tolist() == [1, 1]


def test_one_long_text_does_not_make_every_element_long() -> None:
    value = ["a" * 1_000_000, *[""] * 100_000]
    tracemalloc.start()
    try:
        with pytest.raises(WrongDtype, match="str"):
            sent("float32", value, None)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [None, "a", {"y": 1}, [{"y": 1}], [[1], [2, 3]], [None], 10**400])
def test_what_is_no_array(value: Any) -> None:
    with pytest.raises((WrongDtype, WrongInputName)):
        sent("float32", value, None)


def test_a_list_in_itself() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(WrongDtype):
        sent("float32", value, None)


def test_messages_stay_short() -> None:
    with pytest.raises(WrongInputName) as unknown:
        sent("float32", {"y" * 1_000_000: 1})
    given = tuple(Tensor("y" * 100_000, "bool", (1,), b"\1") for _ in range(9))
    with pytest.raises(WrongInputName) as others:
        check_tensors(spec("bool"), given, 1)
    assert len(unknown.value.message) < 5000
    assert len(others.value.message) < 5000


def test_a_bool_is_0_or_1() -> None:
    check_tensors(spec("bool"), (Tensor("x", "bool", (2,), b"\0\1"),), 2)
    with pytest.raises(WrongDtype, match="neither 0 nor 1"):
        check_tensors(spec("bool"), (Tensor("x", "bool", (2,), b"\0\2"),), 2)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_reply_with_other_rows_than_the_one_asked_for(shape: tuple[int, ...]) -> None:
    reply = (Tensor("y", "uint8", shape, bytes(2 if shape else 1)),)
    with pytest.raises(CorruptMessage):
        to_arrays(reply, single=True)
