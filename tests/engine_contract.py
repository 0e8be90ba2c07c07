"""What every engine must do, as tests over `Subject`s: one engine with a known function each.

An engine's test module subclasses EngineContract and gives the `subject` fixture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from producer.errors import EngineFailed
from workers.engines.base import Array, Engine, Slot


@dataclass
class Subject:
    """`engine` maps input `x_name` of (N, *row_shape) to `expected` of it; `poison` makes it fail.

    `row_shape` is the one to use where the model leaves it open.
    """

    engine: Engine
    x_name: str
    dtype: str
    row_shape: tuple[int, ...]
    expected: Callable[[Array], dict[str, Array]]
    poison: float | None = None


def fill(subject: Subject, slot: Slot, rows: int, seed: int) -> Array:
    """Puts random small whole numbers into the slot; returns a copy of them."""
    values = np.random.default_rng(seed).integers(0, 5, (rows, *subject.row_shape))
    buffer = slot.input_buffer(subject.x_name, rows, subject.row_shape)
    buffer[...] = values
    return np.array(buffer)


def check(outputs: Mapping[str, Array], expected: dict[str, Array]) -> None:
    """Same names, dtypes, shapes and values."""
    assert set(outputs) == set(expected)
    for name, value in expected.items():
        assert outputs[name].dtype == value.dtype
        np.testing.assert_allclose(outputs[name], value, rtol=1e-5, atol=1e-5)


class EngineContract:
    """The suite. Slots are used in the test's own thread unless a test says otherwise."""

    def test_padding_only_adds_rows(self, loaded: Subject) -> None:
        for rows in (1, 2, 3):
            assert loaded.engine.padded_rows(rows) >= rows

    @pytest.fixture
    def loaded(self, subject: Subject) -> Iterator[Subject]:
        subject.engine.load()
        yield subject
        subject.engine.close()

    @pytest.fixture
    def slot(self, loaded: Subject) -> Iterator[Slot]:
        slot = loaded.engine.make_slot()
        slot.activate()
        yield slot
        slot.close()

    def test_no_spec_before_load(self, subject: Subject) -> None:
        with pytest.raises(EngineFailed):
            _ = subject.engine.spec

    def test_spec_names_what_it_takes(self, loaded: Subject) -> None:
        (x,) = loaded.engine.spec.inputs
        assert (x.name, x.dtype) == (loaded.x_name, loaded.dtype)
        assert len(x.shape) == len(loaded.row_shape)
        assert all(want in (None, got) for want, got in zip(x.shape, loaded.row_shape, strict=True))
        assert [t.name for t in loaded.engine.spec.outputs] == list(
            loaded.expected(np.zeros((1, *loaded.row_shape), loaded.dtype))
        )

    def test_buffers_are_writable_and_contiguous(self, loaded: Subject, slot: Slot) -> None:
        buffer = slot.input_buffer(loaded.x_name, 3, loaded.row_shape)
        assert buffer.shape == (3, *loaded.row_shape)
        assert buffer.dtype == np.dtype(loaded.dtype)
        assert buffer.flags.c_contiguous
        assert buffer.flags.writeable

    def test_buffers_grow_and_never_shrink(self, loaded: Subject, slot: Slot) -> None:
        large = slot.input_buffer(loaded.x_name, 300, loaded.row_shape)
        small = slot.input_buffer(loaded.x_name, 1, loaded.row_shape)
        again = slot.input_buffer(loaded.x_name, 300, loaded.row_shape)
        assert large.ctypes.data == small.ctypes.data == again.ctypes.data

    @pytest.mark.parametrize("sizes", [(1,), (64,), (64, 1, 7, 64), (1, 5, 400, 3)])
    def test_batches_of_changing_size(
        self, loaded: Subject, slot: Slot, sizes: tuple[int, ...]
    ) -> None:
        capacity = loaded.engine.capacity
        for seed, size in enumerate(sizes):
            rows = min(size, capacity or size)
            x = fill(loaded, slot, rows, seed)
            check(loaded.engine.run(slot, rows), loaded.expected(x))

    def test_fewer_rows_than_the_buffer_holds(self, loaded: Subject, slot: Slot) -> None:
        if loaded.engine.capacity == 1:
            pytest.skip("takes one row only")
        x = fill(loaded, slot, 8, 1)
        check(loaded.engine.run(slot, 5), loaded.expected(x[:5]))

    def test_refilled_without_asking_for_the_buffer_again(
        self, loaded: Subject, slot: Slot
    ) -> None:
        buffer = slot.input_buffer(loaded.x_name, 1, loaded.row_shape)
        for value in (1, 2, 3):
            buffer[...] = value
            check(loaded.engine.run(slot, 1), loaded.expected(buffer.copy()))

    def test_outputs_stay_until_the_slots_next_run(self, loaded: Subject, slot: Slot) -> None:
        other = loaded.engine.make_slot()
        other.activate()
        x = fill(loaded, slot, 1, 1)
        outputs = loaded.engine.run(slot, 1)
        fill(loaded, slot, 1, 2)
        fill(loaded, other, 1, 3)
        loaded.engine.run(other, 1)
        check(outputs, loaded.expected(x))
        other.close()

    def test_rows_that_were_never_given(self, loaded: Subject, slot: Slot) -> None:
        with pytest.raises(EngineFailed):
            loaded.engine.run(slot, 1)
        x = fill(loaded, slot, 1, 1)
        with pytest.raises(EngineFailed):
            loaded.engine.run(slot, 0)
        with pytest.raises(EngineFailed):
            loaded.engine.run(slot, 1_000_000)
        check(loaded.engine.run(slot, 1), loaded.expected(x))

    def test_more_rows_than_the_capacity(self, loaded: Subject, slot: Slot) -> None:
        capacity = loaded.engine.capacity
        if capacity is None:
            pytest.skip("the model sets no limit")
        fill(loaded, slot, capacity + 1, 1)
        with pytest.raises(EngineFailed, match=str(capacity)):
            loaded.engine.run(slot, capacity + 1)

    def test_usable_again_after_a_failure(self, loaded: Subject, slot: Slot) -> None:
        if loaded.poison is None:
            pytest.skip("no input makes this model fail")
        x = fill(loaded, slot, 4, 1)
        buffer = slot.input_buffer(loaded.x_name, 4, loaded.row_shape)
        for _ in range(2):
            buffer[0] = loaded.poison
            with pytest.raises(EngineFailed):
                loaded.engine.run(slot, 4)
            buffer[0] = x[0]
            check(loaded.engine.run(slot, 4), loaded.expected(x))

    def test_several_slots_at_once(self, loaded: Subject) -> None:
        failures: list[BaseException] = []
        barrier = threading.Barrier(3, timeout=30)

        def serve(number: int) -> None:
            try:
                slot = loaded.engine.make_slot()
                slot.activate()
                barrier.wait()
                for turn in range(20):
                    rows = min(1 + (turn * 7 + number) % 40, loaded.engine.capacity or 40)
                    x = fill(loaded, slot, rows, number * 100 + turn)
                    check(loaded.engine.run(slot, rows), loaded.expected(x))
                slot.close()
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)

    def test_no_run_after_close(self, loaded: Subject) -> None:
        slot = loaded.engine.make_slot()
        slot.activate()
        fill(loaded, slot, 1, 1)
        slot.close()
        loaded.engine.close()
        with pytest.raises(EngineFailed):
            loaded.engine.run(slot, 1)
