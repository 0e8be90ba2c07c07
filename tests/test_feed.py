from __future__ import annotations

import threading
import time

import pytest

from producer.entries import Entry
from producer.task import InferenceTask, Tensor
from workers.batcher import Held
from workers.feed import Feed

KEY = (("float32", (1,)),)


def clock() -> float:
    return time.monotonic() * 1000


def held(number: int, rows: int = 4) -> Held:
    task = InferenceTask(f"c-{number}", rows, (Tensor("x", "float32", (rows, 1), b"0" * 4 * rows),))
    return Held(Entry(0, b"%d-0" % number, b"", rows), task, KEY, clock(), clock() + 1e6)


@pytest.fixture
def feed() -> Feed:
    return Feed(4, 0.0, clock)


def test_taking_wakes_who_waits_for_room_though_the_batch_still_runs(feed: Feed) -> None:
    feed.add([held(1), held(2)])
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(feed.wait_at_most(4, 30_000)))
    waiter.start()
    assert feed.take(1000)
    waiter.join(10)
    assert woken == [True]
    assert feed.running == 1


def test_room_is_waited_for_in_vain_for_a_time(feed: Feed) -> None:
    feed.add([held(1), held(2)])
    assert not feed.wait_at_most(4, 1)
    assert feed.wait_at_most(8, 1)


def test_adding_wakes_every_slot(feed: Feed) -> None:
    found: list[int] = []
    barrier = threading.Barrier(4, timeout=10)

    def serve() -> None:
        barrier.wait()
        found.append(len(feed.take(30_000)))

    slots = [threading.Thread(target=serve) for _ in range(3)]
    for slot in slots:
        slot.start()
    barrier.wait()
    feed.add([held(number) for number in range(3)])
    for slot in slots:
        slot.join(10)
    assert found == [1, 1, 1]
    assert feed.running == 3


def test_the_last_to_finish_wakes_a_slot_for_a_task_that_runs_alone(feed: Feed) -> None:
    feed.add([held(1)])
    assert feed.take(1000)
    alone = held(2)
    alone.alone = True
    feed.add([alone])
    assert feed.take(1) == []
    found: list[list[Held]] = []
    slot = threading.Thread(target=lambda: found.append(feed.take(30_000)))
    slot.start()
    feed.finished()
    slot.join(10)
    assert found == [[alone]]


def test_idle_means_that_nothing_waits_and_nothing_runs(feed: Feed) -> None:
    assert feed.wait_idle(0)
    feed.add([held(1)])
    assert not feed.wait_idle(1)
    feed.take(1000)
    assert not feed.wait_idle(1)
    idle: list[bool] = []
    waiter = threading.Thread(target=lambda: idle.append(feed.wait_idle(30_000)))
    waiter.start()
    feed.finished()
    waiter.join(10)
    assert idle == [True]


def test_what_is_withdrawn_makes_room(feed: Feed) -> None:
    feed.add([held(1), held(2)])
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(feed.wait_at_most(0, 30_000)))
    waiter.start()
    assert len(feed.withdraw(lambda task: True)) == 2
    waiter.join(10)
    assert woken == [True]


def test_closing_lets_everybody_go(feed: Feed) -> None:
    feed.add([held(1)])
    feed.take(1000)
    feed.add([held(2), held(3)])
    alone = [
        threading.Thread(target=feed.take, args=(30_000,)),
        threading.Thread(target=feed.wait_at_most, args=(0, 30_000)),
    ]
    feed.take(1000)
    feed.take(1000)
    for thread in alone:
        thread.start()
    feed.close()
    for thread in alone:
        thread.join(10)
    assert not any(thread.is_alive() for thread in alone)


def test_time_with_a_batch_in_a_slot_is_counted_once_for_all_slots() -> None:
    now_ms = [0.0]
    feed = Feed(4, 0.0, lambda: now_ms[0])
    feed.add([held(1), held(2), held(3)])
    now_ms[0] = 10.0
    assert feed.busy_ms == 0
    feed.take(0)
    now_ms[0] = 13.0
    feed.take(0)
    assert feed.busy_ms == 3
    feed.finished()
    now_ms[0] = 15.0
    feed.finished()
    now_ms[0] = 50.0
    assert feed.busy_ms == 5
    feed.take(0)
    now_ms[0] = 51.0
    assert feed.busy_ms == 6
