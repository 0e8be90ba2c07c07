"""Hooks around an engine: what is imported, what they may do, and whose errors are whose."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.entries import Entry, Settlement
from producer.errors import (
    DeviceLost,
    EngineFailed,
    HookFailed,
    InvalidInput,
    OutOfDeviceMemory,
)
from producer.spec import ModelSpec, TensorSpec
from producer.task import InferenceTask, Reply, Tensor
from producer.wire import decode_replies
from tests.support.fake_cuda import FakeDriver, FakeModule
from tests.support.fake_engine import FakeEngine
from workers.batcher import Held
from workers.engines.base import Array, Engine
from workers.engines.hook_functions import Hook
from workers.engines.hooks import HookedEngine, InputBuffers
from workers.executor import Executor
from workers.feed import Feed
from workers.files import RowFiles
from workers.incidents import Incidents
from workers.metrics import Counters
from workers.runner import BatchRunner
from workers.stages import Stages
from workers.tensorrt.engine import TensorRTEngine
from workers.tensorrt.flavor import Flavor
from workers.tensorrt.provide import Plan

Preprocess = Callable[[Mapping[str, Array], InputBuffers], Any]
Postprocess = Callable[[Mapping[str, Array]], Any]

X = TensorSpec(name="x", dtype="float32", shape=(2,))
Y = TensorSpec(name="y", dtype="float32", shape=(2,))
#: What clients send and get: eighths as bytes, and a whole number.
BYTES = TensorSpec(name="eighths", dtype="uint8", shape=(2,))
TOTAL = TensorSpec(name="total", dtype="int64", shape=())


def eighths(inputs: Mapping[str, Array], into: InputBuffers) -> None:
    np.divide(inputs["eighths"], 8, out=into["x"])


def total(outputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"total": outputs["y"].sum(axis=1).astype(np.int64)}


def fake(x: TensorSpec = X, **options: Any) -> FakeEngine:
    """y is 16 times x."""
    return FakeEngine(lambda inputs: {"y": inputs["x"] * 16}, (x,), (Y,), **options)


class Clock:
    """A millisecond later at each look."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def __call__(self) -> float:
        self.now_ms += 1
        return self.now_ms


def hooked(
    engine: Engine,
    preprocess: Preprocess | None = None,
    postprocess: Postprocess | None = None,
    sent: Sequence[TensorSpec] = (BYTES,),
    got: Sequence[TensorSpec] = (TOTAL,),
) -> HookedEngine:
    """`engine`, loaded, with the functions as hooks of model 'm'."""
    made = HookedEngine(
        engine,
        "m",
        preprocess and Hook("model 'm': preprocess 'a:b'", preprocess, tuple(sent)),
        postprocess and Hook("model 'm': postprocess 'a:c'", postprocess, tuple(got)),
        max_batch=4,
        clock=Clock(),
    )
    made.load()
    return made


def run(engine: HookedEngine, rows: Any, name: str = "eighths") -> Mapping[str, Array]:
    rows = np.asarray(rows)
    slot = engine.make_slot()
    slot.activate()
    slot.input_buffer(name, len(rows), rows.shape[1:])[...] = rows
    return engine.run(slot, len(rows))


def test_clients_see_the_hooks_and_the_engine_sees_its_own() -> None:
    inner = fake(limit=9)
    engine = hooked(inner, eighths, total)
    assert engine.spec.inputs == (TensorSpec(name="eighths", dtype="uint8", shape=(2,)),)
    assert engine.spec.outputs == (TensorSpec(name="total", dtype="int64", shape=()),)
    assert engine.capacity == 9
    assert engine.warm_sizes(8) == [1, 8]
    assert engine.pinned_bytes is None
    (found,) = run(engine, [[8, 16], [4, 0], [255, 1]]).items()
    assert found[0] == "total"
    assert found[1].dtype == np.int64
    assert found[1].tolist() == [48, 8, 512]
    assert inner.calls[0].inputs["x"].tolist() == [[1, 2], [0.5, 0], [31.875, 0.125]]


def test_one_hook_leaves_the_other_side_as_the_engines() -> None:
    engine = hooked(fake(), preprocess=eighths)
    assert engine.spec.outputs == (Y,)
    assert run(engine, [[8, 16]])["y"].tolist() == [[16, 32]]
    engine = hooked(fake(), postprocess=total)
    assert engine.spec.inputs == (X,)
    assert run(engine, [[1.0, 2.0]], "x")["total"].tolist() == [48]


def test_hooks_run_in_the_slots_thread_on_the_engines_own_memory() -> None:
    seen: list[Array] = []

    def note(inputs: Mapping[str, Array], into: InputBuffers) -> None:
        seen.append(into["x"])
        eighths(inputs, into)

    engine = hooked(fake(), note, total)
    slot = engine.make_slot()
    slot.activate()
    slot.input_buffer("eighths", 3, (2,))[...] = 8
    engine.run(slot, 3)
    assert seen[0].shape == (3, 2)
    assert seen[0].ctypes.data == slot.inner.input_buffer("x", 3, (2,)).ctypes.data


def test_memory_for_a_whole_batch_is_there_from_the_start() -> None:
    slot = hooked(fake(), eighths, total).make_slot()
    one, four = (slot.input_buffer("eighths", rows, (2,)).ctypes.data for rows in (1, 4))
    assert one == four
    wide = [TensorSpec(name="eighths", dtype="uint8", shape=(1000,))]
    slot = hooked(fake(limit=2), eighths, sent=wide).make_slot()
    one, two, four = (slot.input_buffer("eighths", n, (1000,)).ctypes.data for n in (1, 2, 4))
    assert one == two != four
    for size in (1 << 60, 1 << 90):
        huge = [TensorSpec(name="eighths", dtype="uint8", shape=(size,))]
        with pytest.raises(EngineFailed, match="no memory for 4 rows"):
            hooked(fake(), eighths, sent=huge).make_slot()


@pytest.mark.parametrize("way", ["assigned", "asked for"])
def test_an_engine_input_of_any_length(way: str) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=(None,))

    def fill(inputs: Mapping[str, Array], into: InputBuffers) -> None:
        length = int(inputs["length"].max())
        values = np.arange(length, dtype=np.float64) * np.ones((len(inputs["length"]), 1))
        assert list(into) == ["x"]
        assert len(into) == 1
        assert "x" in into
        assert "length" not in into
        if way == "assigned":
            into["x"] = values
        else:
            into.buffer("x", (length,))[...] = values

    inner = FakeEngine(lambda inputs: {"y": inputs["x"][:, :2]}, (x,), (Y,))
    engine = hooked(inner, fill, sent=[TensorSpec(name="length", dtype="int32", shape=())])
    for lengths in ([2, 5], [7], [3, 3, 3]):
        run(engine, lengths, "length")
        given = inner.calls[-1].inputs["x"]
        assert given.tolist() == [list(range(max(lengths)))] * len(lengths)


def use(
    action: Callable[[InputBuffers], Any],
) -> Callable[[Mapping[str, Array], InputBuffers], None]:
    return lambda inputs, into: action(into)


WRONG_PREPROCESS: list[tuple[str, Preprocess, str]] = [
    ("raises", use(lambda into: 1 / 0), "raised ZeroDivisionError: division by zero"),
    ("exits", use(lambda into: sys.exit(3)), "raised SystemExit: 3"),
    ("nothing", lambda inputs, into: inputs, r"did not fill the model's input 'x': write to"),
    ("another name", use(lambda into: into["z"]), r"the model has inputs \['x'\], not 'z'"),
    ("rank", use(lambda into: into.buffer("x", (2, 2))), r"shape \(2, 2\).*takes \(2\)"),
    ("size", use(lambda into: into.buffer("x", (3,))), r"shape \(3,\) of the model's input 'x'"),
    ("negative", use(lambda into: into.buffer("x", (-2,))), r"shape \(-2,\)"),
    ("broadcast", use(lambda into: np.copyto(into["x"], np.zeros(3))), "raised ValueError"),
    ("list", use(lambda into: into.__setitem__("x", [[1, 2]])), "to list; it must be an array"),
    ("rows", use(lambda into: into.__setitem__("x", np.zeros((3, 2)))), r"to \(3, 2\).*of 1 rows"),
    ("shape", use(lambda into: into.__setitem__("x", np.zeros((1, 3)))), r"asked for.*\(3,\)"),
    (
        "complex",
        use(lambda into: into.__setitem__("x", np.zeros((1, 2), "c8"))),
        "to an array of complex64",
    ),
]


@pytest.mark.parametrize(
    ("function", "words"), [w[1:] for w in WRONG_PREPROCESS], ids=[w[0] for w in WRONG_PREPROCESS]
)
def test_a_wrong_preprocess_is_named_and_the_slot_goes_on(function: Preprocess, words: str) -> None:
    wrong = [True]

    def sometimes(inputs: Mapping[str, Array], into: InputBuffers) -> None:
        (function if wrong else eighths)(inputs, into)

    inner = fake()
    engine = hooked(inner, sometimes, total)
    slot = engine.make_slot()
    slot.activate()
    slot.input_buffer("eighths", 1, (2,))[...] = 8
    with pytest.raises(HookFailed, match=words) as failure:
        engine.run(slot, 1)
    assert "model 'm': preprocess 'a:b'" in failure.value.message
    assert not inner.calls
    wrong.clear()
    assert engine.run(slot, 1)["total"].tolist() == [32]


def test_no_hook_runs_for_a_batch_that_the_engine_cannot_take() -> None:
    ran: list[int] = []
    engine = hooked(fake(limit=2), use(lambda into: ran.append(into.rows)))
    slot = engine.make_slot()
    slot.activate()
    slot.input_buffer("eighths", 3, (2,))[...] = 8
    for rows in (0, 3):
        with pytest.raises(EngineFailed, match=f"model 'm' runs 1 to 2 rows, not {rows}"):
            engine.run(slot, rows)
    engine.close()
    with pytest.raises(EngineFailed, match="model 'm' is not loaded"):
        engine.run(slot, 1)
    assert not ran


def test_work_in_place_copies_nothing() -> None:
    asked: list[str] = []

    def double(inputs: Mapping[str, Array], into: InputBuffers) -> None:
        into["x"][...] = inputs["eighths"]
        into["x"] *= 2

    inner = fake()
    engine = hooked(inner, double)
    slot = engine.make_slot()
    slot.activate()
    original = slot.inner.input_buffer

    def counted(name: str, rows: int, row_shape: tuple[int, ...]) -> Array:
        asked.append(name)
        return original(name, rows, row_shape)

    slot.inner.input_buffer = counted  # type: ignore[method-assign]
    slot.input_buffer("eighths", 1, (2,))[...] = 8
    assert engine.run(slot, 1)["y"].tolist() == [[256, 256]]
    assert asked == ["x"]


def test_an_input_of_any_length_without_a_shape_that_fits() -> None:
    x = TensorSpec(name="x", dtype="float32", shape=(None,))
    for shape in ((-2,), (2, 2), ()):
        engine = hooked(fake(x), use(lambda into, shape=shape: into.buffer("x", shape)))
        with pytest.raises(HookFailed, match=r"asked for rows of shape .* takes \(any\)"):
            run(engine, [[1, 2]])
    engine = hooked(fake(x), use(lambda into: into["x"]))
    with pytest.raises(HookFailed, match=r"dynamic axes \(any\).*into\.buffer\('x', row_shape\)"):
        run(engine, [[1, 2]])


GOOD = np.zeros(1, np.int64)
WRONG_POSTPROCESS: list[tuple[str, Any, str]] = [
    ("nothing", None, "returned a NoneType, not a dict with outputs"),
    ("array", GOOD, "returned a ndarray, not a dict"),
    ("missing", {}, r"returned outputs \[\], not \['total'\]"),
    ("too many", {"total": GOOD, "y": GOOD}, r"returned outputs \['total', 'y'\]"),
    ("not str", {"total": GOOD, 3: GOOD}, r"returned outputs \['3', 'total'\]"),
    ("list", {"total": [0]}, "'total' as a list, not a numpy array"),
    ("dtype", {"total": np.zeros(1)}, "'total' as float64, not int64"),
    ("byte order", {"total": np.zeros(1, ">i8")}, "'total' as >i8, not int64"),
    ("rows", {"total": np.zeros(2, np.int64)}, r"of shape \(2,\) for 1 rows"),
    ("no rows", {"total": np.zeros((), np.int64)}, r"of shape \(\) for 1 rows"),
    ("shape", {"total": np.zeros((1, 1), np.int64)}, r"must be 1 rows of \(\)"),
]


@pytest.mark.parametrize(
    ("found", "words"), [w[1:] for w in WRONG_POSTPROCESS], ids=[w[0] for w in WRONG_POSTPROCESS]
)
def test_a_wrong_postprocess_is_named(found: Any, words: str) -> None:
    with pytest.raises(HookFailed, match=words) as failure:
        run(hooked(fake(), eighths, lambda outputs: found), [[8, 8]])
    assert "model 'm': postprocess 'a:c'" in failure.value.message


def test_outputs_come_in_the_configured_order_as_plain_arrays() -> None:
    got = [TensorSpec(name=name, dtype="float32", shape=(None,)) for name in ("b", "a")]

    def both(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"a": outputs["y"][:, :1], "b": np.ma.masked_array(outputs["y"])}

    engine = hooked(fake(), postprocess=both, got=got)
    found = run(engine, [[1.0, 2.0]], "x")
    assert list(found) == ["b", "a"]
    assert [type(array) for array in found.values()] == [np.ndarray] * 2
    assert found["b"].tolist() == [[16, 32]]
    assert found["a"].tolist() == [[16]]


def test_the_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(HookFailed):
        run(hooked(fake(), use(lambda into: 1 / 0)), [[8, 8]])
    assert "Traceback" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("failure", [DeviceLost("gone"), OutOfDeviceMemory("full")])
def test_errors_of_the_device_pass_as_they_are(failure: EngineFailed) -> None:
    with pytest.raises(type(failure), match=failure.message):
        run(hooked(fake(script=[failure]), eighths, total), [[8, 8]])

    def lose(name: str, rows: int, row_shape: tuple[int, ...]) -> Array:
        raise failure

    engine = hooked(fake(), eighths, total)
    slot = engine.make_slot()
    slot.activate()
    slot.input_buffer("eighths", 1, (2,))[...] = 8
    slot.inner.input_buffer = lose  # type: ignore[method-assign]
    with pytest.raises(type(failure), match=failure.message):
        engine.run(slot, 1)


def test_a_hook_may_refuse_its_input_in_its_own_words() -> None:
    def refuse(inputs: Mapping[str, Array], into: InputBuffers) -> None:
        raise InvalidInput("no JPEG")

    with pytest.raises(InvalidInput, match=r"^no JPEG$"):
        run(hooked(fake(), refuse), [[8, 8]])


def test_stage_times() -> None:
    engine = hooked(fake(), eighths, total)
    slot = engine.make_slot()
    slot.activate()
    assert slot.stage_ms == {}
    slot.input_buffer("eighths", 1, (2,))[...] = 8
    engine.run(slot, 1)
    assert slot.stage_ms == {"preprocess": 1.0, "postprocess": 1.0}
    slot.close()
    with pytest.raises(EngineFailed, match="'eighths' was not given 1 rows"):
        engine.run(slot, 1)
    assert slot.stage_ms == {}


def test_around_tensorrt_a_batch_is_filled_up_and_its_memory_counted() -> None:
    driver = FakeDriver()
    inner = TensorRTEngine(
        lambda: Plan(b"plan", Path("m.engine"), "key", from_cache=True),
        max_batch=16,
        slots=1,
        pinned_limit_bytes=1 << 20,
        driver=driver,
        flavor=Flavor("tensorrt", FakeModule(driver), "10.0"),
    )
    sent = TensorSpec(name="eighths", dtype="uint8", shape=(4,))
    engine = hooked(inner, eighths, total, [sent])
    assert engine.capacity == 16
    assert engine.warm_sizes(16) == inner.warm_sizes(16)
    slot = engine.make_slot()
    slot.activate()
    given = np.arange(9 * 4, dtype=np.uint8).reshape(9, 4) * 4
    slot.input_buffer("eighths", 9, (4,))[...] = given
    driver.calls.clear()
    found = engine.run(slot, 9)["total"]
    assert found.tolist() == (given.sum(axis=1) / 4).tolist()
    assert driver.calls[0] == ("copy_in", (10, 4))
    assert slot.stage_ms == {
        **{"preprocess": 1.0, "postprocess": 1.0},
        **{"h2d": 1.0, "execute": 2.0, "d2h": 3.0},
    }
    assert engine.pinned_bytes == inner.pinned_bytes
    assert inner.pinned_bytes
    slot.close()
    engine.close()
    assert driver.live == {"pinned": [], "device": []}


class Bench:
    """A runner over a hooked engine; answers by task number."""

    def __init__(self, engine: HookedEngine) -> None:
        self.engine = engine
        self.stages = Stages()
        self.spec = ModelSpec(
            name="m",
            inputs=engine.spec.inputs,
            outputs=engine.spec.outputs,
            max_batch=64,
            max_rows_per_task=64,
        )
        files = RowFiles([])
        counters = Counters()
        self.runner = BatchRunner(
            engine, self.spec, files, counters, self.stages, Incidents("m", counters), Clock()
        )
        self.slot = engine.make_slot()
        self.slot.activate()

    def answers(self, tasks: list[list[int]]) -> list[Reply]:
        held = []
        for number, values in enumerate(tasks):
            rows = np.array([[value, value] for value in values], np.uint8)
            tensor = Tensor("eighths", "uint8", rows.shape, rows.tobytes())
            entry = Entry(1, f"{number}-0".encode(), b"", len(values))
            task = InferenceTask(f"client-{number}", len(values), (tensor,))
            held.append(Held(entry, task, (("uint8", (2,)),), 0.0, float("inf")))
        replies = [one for done in self.runner.run(self.slot, held) for one in replies_of(done)]
        return sorted(replies, key=lambda reply: int(reply.task_id.partition("-")[2]))


def replies_of(done: Settlement) -> Iterator[Reply]:
    return decode_replies(done.reply)


@given(st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=3), min_size=1, max_size=12))
def test_only_the_tasks_concerned_fail(tasks: list[list[int]]) -> None:
    def early(inputs: Mapping[str, Array], into: InputBuffers) -> None:
        if (inputs["eighths"] == 13).any():
            raise ValueError("thirteen")
        eighths(inputs, into)

    def late(outputs: Mapping[str, Array]) -> dict[str, Array]:
        found = total(outputs)["total"]
        return {"total": found.astype(np.int32) if (found == 7 * 4).any() else found}

    bench = Bench(hooked(fake(), early, late))
    for values, reply in zip(tasks, bench.answers(tasks), strict=True):
        if 13 in values or 7 in values:
            assert reply.error_code == "hook_failed"
            assert ("raised ValueError: thirteen" in reply.error_message) == (13 in values)
            assert ("int32, not int64" in reply.error_message) == (13 not in values)
        else:
            (output,) = reply.outputs
            assert np.frombuffer(output.data, output.dtype).tolist() == [v * 4 for v in values]


def test_hooks_are_stages_of_their_own() -> None:
    bench = Bench(hooked(fake(), eighths, total))
    bench.answers([[1], [2, 3]])
    bench.answers([[1]])
    durations = bench.stages.durations()
    assert durations["preprocess"].observations == 2
    assert durations["postprocess"].observations == 2
    assert durations["h2d"].observations == 0


def warmed(engine: HookedEngine) -> None:
    spec = ModelSpec(
        name="m",
        inputs=engine.spec.inputs,
        outputs=engine.spec.outputs,
        max_batch=8,
        max_rows_per_task=8,
    )
    counters = Counters()
    incidents = Incidents("m", counters)
    runner = BatchRunner(engine, spec, RowFiles([]), counters, Stages(), incidents, Clock())
    feed = Feed(8, 2.0, Clock())
    executor = Executor(
        engine, spec, feed, runner, 2, lambda done, urgent: None, lambda reason: None, incidents
    )
    try:
        executor.start(timeout_s=30)
    finally:
        executor.close()


def test_warming_runs_the_hooks(caplog: pytest.LogCaptureFixture) -> None:
    sizes: list[int] = []

    def note(inputs: Mapping[str, Array], into: InputBuffers) -> None:
        sizes.append(into.rows)
        eighths(inputs, into)

    warmed(hooked(fake(), note, total))
    assert sorted(sizes) == [1, 1, 8, 8]
    assert "warm-up" not in caplog.text


def test_a_hook_that_takes_no_zeros_is_warmed_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warmed(hooked(fake(), use(lambda into: 1 / 0), total))
    assert "warm-up of 'm' with 8 rows" in caplog.text
    with pytest.raises(DeviceLost):
        warmed(hooked(fake(script=[DeviceLost("gone")] * 4), eighths, total))
