"""The TensorRT engine's bookkeeping over a recording CUDA driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from producer.errors import ConfigError, EngineFailed, EngineMismatch, OutOfDeviceMemory
from tests.support.fake_cuda import FakeDriver, FakeModule
from workers.engines.base import Array
from workers.tensorrt.engine import TensorRTEngine, pinned_limit_bytes
from workers.tensorrt.flavor import Flavor
from workers.tensorrt.provide import Plan
from workers.tensorrt.slot import TensorRTSlot


class Subject:
    """A loaded engine over the fakes."""

    def __init__(self, driver: FakeDriver, *, plan: bytes = b"plan", slots: int = 2) -> None:
        self.driver = driver
        self.module = FakeModule(driver)
        self.engine = TensorRTEngine(
            lambda: Plan(plan, Path("m.engine"), "key", from_cache=True),
            max_batch=16,
            slots=slots,
            pinned_limit_bytes=1200,
            driver=driver,
            flavor=Flavor("tensorrt", self.module, "10.0"),
        )

    def run(self, slot: TensorRTSlot, rows: Array) -> Array:
        slot.input_buffer("x", len(rows), (4,))[...] = rows
        return self.engine.run(slot, len(rows))["y"]


@pytest.fixture
def subject() -> Subject:
    made = Subject(FakeDriver())
    made.engine.load()
    return made


@pytest.fixture
def slot(subject: Subject) -> Iterator[TensorRTSlot]:
    made = subject.engine.make_slot()
    made.activate()
    yield made
    made.close()


def rows(count: int) -> Array:
    return np.arange(4 * count, dtype=np.float32).reshape(count, 4)


def test_what_the_plan_says(subject: Subject) -> None:
    spec = subject.engine.spec
    assert [(t.name, t.dtype, t.shape) for t in (*spec.inputs, *spec.outputs)] == [
        ("x", "float32", (4,)),
        ("y", "float32", (4,)),
    ]
    assert subject.engine.capacity == 16
    assert subject.driver.depth == 0


def test_a_batch_is_copied_run_and_copied_back_on_one_wait(
    subject: Subject, slot: TensorRTSlot
) -> None:
    subject.driver.calls.clear()
    np.testing.assert_array_equal(subject.run(slot, rows(3)), rows(3) * 2)
    assert subject.driver.calls == [
        ("copy_in", (3, 4)),
        ("execute", 1, (3, 4)),
        ("copy_out", (3, 4)),
        ("wait",),
    ]


def test_the_smallest_profile_that_holds_the_batch(subject: Subject, slot: TensorRTSlot) -> None:
    for count in (4, 5, 1, 16):
        np.testing.assert_array_equal(subject.run(slot, rows(count)), rows(count) * 2)
    used = [call[1] for call in subject.driver.calls if call[0] == "execute"]
    assert used == [1, 0, 1, 0]
    assert [context.profile for context in subject.module.plan.contexts] == [1, 0]


def test_a_batch_is_filled_up_with_its_last_row(subject: Subject, slot: TensorRTSlot) -> None:
    assert subject.engine.warm_sizes(16) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    subject.run(slot, rows(16))
    found = subject.run(slot, rows(9))
    np.testing.assert_array_equal(found, rows(9) * 2)
    assert subject.driver.calls[-4:-1] == [
        ("copy_in", (10, 4)),
        ("execute", 0, (10, 4)),
        ("copy_out", (10, 4)),
    ]
    np.testing.assert_array_equal(slot.input_buffer("x", 10, (4,))[9], rows(9)[8])


def test_the_rows_that_are_computed_are_told(subject: Subject, slot: TensorRTSlot) -> None:
    subject.run(slot, rows(9))
    assert [subject.engine.padded_rows(count) for count in (1, 8, 9, 11, 16)] == [1, 8, 10, 12, 16]
    subject.engine.close()


def test_stage_times_of_the_last_batch(subject: Subject, slot: TensorRTSlot) -> None:
    subject.run(slot, rows(2))
    assert subject.driver.marks[-4:] == [0, 1, 2, 3]
    assert dict(slot.stage_ms) == {"h2d": 1.0, "execute": 2.0, "d2h": 3.0}


def test_nothing_is_allocated_after_the_first_batches(subject: Subject, slot: TensorRTSlot) -> None:
    subject.run(slot, rows(16))
    before = {kind: list(live) for kind, live in subject.driver.live.items()}
    for count in (1, 16, 7, 3, 16):
        subject.run(slot, rows(count))
    assert subject.driver.live == before


def test_a_batch_beyond_the_profiles_fails_before_anything_is_enqueued(
    subject: Subject, slot: TensorRTSlot
) -> None:
    subject.driver.calls.clear()
    with pytest.raises(EngineFailed, match="no optimization profile"):
        subject.run(slot, rows(17))
    assert not [call for call in subject.driver.calls if call[0] in ("copy_in", "execute")]
    np.testing.assert_array_equal(subject.run(slot, rows(2)), rows(2) * 2)


def test_a_refused_batch_leaves_the_slot_usable(subject: Subject, slot: TensorRTSlot) -> None:
    subject.run(slot, rows(1))
    (context,) = subject.module.plan.contexts
    context.refuses = True
    with pytest.raises(EngineFailed, match="could not run"):
        subject.run(slot, rows(2))
    assert subject.driver.calls[-1] == ("wait",)
    context.refuses = False
    np.testing.assert_array_equal(subject.run(slot, rows(2)), rows(2) * 2)


def test_everything_is_freed(subject: Subject) -> None:
    slot = subject.engine.make_slot()
    slot.activate()
    subject.run(slot, rows(16))
    assert subject.engine.pinned_bytes > 0
    slot.close()
    slot.close()
    subject.engine.close()
    subject.engine.close()
    assert subject.driver.live == {"pinned": [], "device": []}
    assert (subject.engine.pinned_bytes, subject.driver.depth, subject.driver.opened) == (0, 0, 0)


def test_a_failed_activation_frees_what_it_had(subject: Subject) -> None:
    first, second, third = (subject.engine.make_slot() for _ in range(3))
    first.activate()
    second.activate()
    with pytest.raises(ConfigError, match="TRTQ_PINNED_LIMIT_BYTES"):
        third.activate()
    for slot in (third, second, first):
        slot.close()
    assert subject.driver.live == {"pinned": [], "device": []}


def test_a_plan_of_another_kind() -> None:
    subject = Subject(FakeDriver(), plan=b"other")
    with pytest.raises(EngineMismatch, match=r"m\.engine cannot be used by tensorrt 10\.0"):
        subject.engine.load()
    subject.engine.close()
    assert (subject.driver.depth, subject.driver.opened) == (0, 0)


def test_contexts_that_do_not_fit() -> None:
    subject = Subject(FakeDriver(device_bytes=2000), slots=3)
    with pytest.raises(OutOfDeviceMemory, match="lower slots"):
        subject.engine.load()
    subject.engine.close()


def test_use_before_load() -> None:
    subject = Subject(FakeDriver())
    with pytest.raises(EngineFailed, match="call load first"):
        _ = subject.engine.spec
    subject.engine.close()


def test_the_pinned_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTQ_PINNED_LIMIT_BYTES", "4096")
    assert pinned_limit_bytes() == 4096
    monkeypatch.setenv("TRTQ_PINNED_LIMIT_BYTES", "4k")
    with pytest.raises(ConfigError, match="4k"):
        pinned_limit_bytes()
    monkeypatch.delenv("TRTQ_PINNED_LIMIT_BYTES")
    assert pinned_limit_bytes() > 1 << 20
