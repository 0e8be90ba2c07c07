"""What the executor is compared with: loops over one context, and the check of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from benchmarks.gpu.subject import Subject
from workers.tensorrt.context import PlanContext
from workers.tensorrt.cuda import PyCudaDriver, Stream, current


class Bare(NamedTuple):
    """A context with device buffers for one batch size."""

    context: PlanContext
    stream: Stream
    input_address: int
    output_address: int


@contextmanager
def bare_context(subject: Subject, batch: int, *, graphs: bool) -> Iterator[Bare]:
    """The engine alone: buffers on the device, no host copies."""
    engine = subject.engine(slots=1, graphs=graphs)
    driver = PyCudaDriver()
    driver.open()
    try:
        with current(driver):
            shape = (batch, *subject.row)
            stream = driver.stream()
            profile = engine._loaded.profile_for({"x": shape})
            assert profile is not None
            context = engine._new_context(profile, stream.handle)
            context.set_shapes({"x": shape})
            source = driver.device(batch * subject.row_bytes)
            target = driver.device(batch * subject.width * 4)
            context.bind({"x": source.address, "y": target.address})
            bare = Bare(context, stream, source.address, target.address)
            for _ in range(2):
                # A kind of batch that comes again is captured, where graphs are wanted.
                _enqueue(bare)
                stream.wait()
                context.after_run(stream.handle)
            yield bare
            context.close()
            source.free()
            target.free()
            del stream
    finally:
        driver.close()
        engine.close()


def rate(once: Callable[[], None], finish: Callable[[], None], batch: int, seconds: float) -> float:
    """Rows/s of `once` called back to back for about `seconds`, `finish` at the end."""

    def run(times: int) -> float:
        started_s = time.perf_counter()
        for _ in range(times):
            once()
        finish()
        return time.perf_counter() - started_s

    run(10)
    times = max(10, int(seconds / (run(20) / 20)))
    return times * batch / run(times)


def back_to_back(bare: Bare, batch: int, seconds: float) -> float:
    """Rows/s of enqueueing without a wait in between."""
    return rate(lambda: _enqueue(bare), bare.stream.wait, batch, seconds)


def serial(bare: Bare, batch: int, seconds: float) -> float:
    """Rows/s of enqueueing and waiting for each batch, without copies."""

    def once() -> None:
        _enqueue(bare)
        bare.stream.wait()

    return rate(once, lambda: None, batch, seconds)


def synchronous(subject: Subject, bare: Bare, batch: int, seconds: float) -> float:
    """Rows/s of pageable copies that wait, as a plain script does it."""
    import pycuda.driver as cuda

    source = subject.rows(batch, 5)
    target = np.empty((batch, subject.width), np.float32)

    def once() -> None:
        cuda.memcpy_htod(bare.input_address, source)
        _enqueue(bare)
        bare.stream.wait()
        cuda.memcpy_dtoh(target, bare.output_address)

    return rate(once, lambda: None, batch, seconds)


def _enqueue(bare: Bare) -> None:
    if not bare.context.enqueue(bare.stream.handle):
        raise AssertionError("TensorRT refused a batch")


def worst_errors(subject: Subject, sizes: tuple[int, ...], *, graphs: bool) -> tuple[float, float]:
    """Largest relative error against torch, by 2-norm and by maximum, over fresh random batches.

    The output buffer is poisoned before each run, each size runs twice (the second may be a graph).
    """
    engine = subject.engine(slots=1, graphs=graphs)
    slot = engine.make_slot()
    slot.activate()
    norm = largest = 0.0
    try:
        for seed, count in enumerate(size for size in sizes for _ in range(2)):
            rows = subject.rows(count, seed)
            slot.input_buffer("x", count, subject.row)[...] = rows
            found, wanted = engine.run(slot, count)["y"], subject.expected(rows)
            difference = found - wanted
            norm = max(norm, float(np.linalg.norm(difference) / np.linalg.norm(wanted)))
            largest = max(largest, float(np.abs(difference).max() / np.abs(wanted).max()))
            found[...] = 1e9
    finally:
        slot.close()
        engine.close()
    return norm, largest
