"""Many batches of changing sizes, and many loads: what memory, threads and handles do."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.gpu.subject import Subject
from workers.tensorrt.cuda import PyCudaDriver, current

_SLOTS = 3


class Usage(NamedTuple):
    """What the process holds."""

    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    threads: int
    handles: int


def usage(driver: PyCudaDriver, pinned_bytes: int) -> Usage:
    """The process now; `driver` is open."""
    with current(driver):
        free, total = driver.memory_bytes()
    process = psutil.Process()
    return Usage(
        total - free,
        process.memory_info().rss,
        pinned_bytes,
        process.num_threads(),
        process.num_fds(),
    )


def many_batches(subject: Subject, batches: int, after: int) -> tuple[Usage, Usage]:
    """Usage after the first `after` batches of random sizes on three slots, and after `batches`."""
    engine, driver = subject.engine(slots=_SLOTS, graphs=True), PyCudaDriver()
    driver.open()
    parts = [(after // _SLOTS, 1), ((batches - after) // _SLOTS, 2)]
    barrier = threading.Barrier(_SLOTS + 1, timeout=600)
    failures: list[BaseException] = []
    largest = max(subject.batches)
    rows = subject.rows(largest, 1)

    def serve(number: int) -> None:
        slot = engine.make_slot()
        try:
            slot.activate()
            # Every size once: what they need is allocated then, however the sizes fall.
            for count in range(1, largest + 1):
                slot.input_buffer("x", count, subject.row)[...] = rows[:count]
                engine.run(slot, count)
            for times, seed in parts:
                random = np.random.default_rng(10 * number + seed)
                for count in random.integers(1, largest + 1, times):
                    slot.input_buffer("x", int(count), subject.row)[...] = rows[:count]
                    engine.run(slot, int(count))
                barrier.wait()
                barrier.wait()
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()
            raise
        finally:
            slot.close()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(_SLOTS)]
    for thread in threads:
        thread.start()
    found = []
    for _ in parts:
        barrier.wait()
        found.append(usage(driver, engine.pinned_bytes))
        barrier.wait()
    for thread in threads:
        thread.join(60)
    engine.close()
    driver.close()
    if failures:
        raise failures[0]
    return found[0], found[1]


def many_loads(subject: Subject, times: int) -> tuple[Usage, Usage]:
    """Usage after the fifth load, run and unload of the engine, and after the last."""
    driver = PyCudaDriver()
    driver.open()
    found = []
    rows = subject.rows(8, 1)
    for number in range(times):
        engine = subject.engine(slots=1, graphs=True)
        slot = engine.make_slot()
        slot.activate()
        slot.input_buffer("x", 8, subject.row)[...] = rows
        engine.run(slot, 8)
        slot.close()
        engine.close()
        if number in (4, times - 1):
            found.append(usage(driver, engine.pinned_bytes))
    driver.close()
    return found[0], found[1]
