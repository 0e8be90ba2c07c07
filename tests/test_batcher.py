"""The batcher: which tasks go together, for any held tasks and any time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from producer.entries import Entry
from producer.task import InferenceTask
from workers.batcher import AGING_MS, Held, choose

A = (("float32", (4,)),)
B = (("float32", (8,)),)


def held(
    number: int,
    *,
    rows: int = 1,
    shape: tuple[tuple[str, tuple[int, ...]], ...] = A,
    priority: int = 1,
    arrived_ms: float = 0.0,
    alone: bool = False,
) -> Held:
    entry = Entry(priority, b"%d-0" % number, b"", rows)
    task = InferenceTask(f"c-{number}", rows)
    return Held(entry, task, shape, arrived_ms, float("inf"), alone)


def pick(
    tasks: list[Held], now_ms: float = 0.0, *, idle: bool = False, delay_ms: float = 2.0
) -> tuple[list[Held], float | None]:
    return choose(tasks, now_ms, max_batch=4, max_delay_ms=delay_ms, idle=idle)


def test_nothing_held() -> None:
    assert pick([]) == ([], None)


def test_a_lone_task_goes_at_once_when_nothing_runs() -> None:
    one = held(1)
    assert pick([one], idle=True) == ([one], None)


def test_a_part_waits_from_its_first_task_on() -> None:
    tasks = [held(1, arrived_ms=10.0), held(2, arrived_ms=11.0)]
    assert pick(tasks, 11.0) == ([], 12.0)
    assert pick(tasks, 12.0) == (tasks, None)


def test_no_delay_means_at_once() -> None:
    one = held(1)
    assert pick([one], delay_ms=0.0) == ([one], None)


def test_a_full_batch_goes_at_once() -> None:
    tasks = [held(n) for n in range(6)]
    assert pick(tasks) == (tasks[:4], None)


def test_a_task_that_does_not_fit_makes_the_batch_full() -> None:
    tasks = [held(1, rows=3), held(2, rows=2)]
    assert pick(tasks) == (tasks[:1], None)


def test_only_equal_shapes_share_a_batch() -> None:
    tasks = [held(1), held(2, shape=B), held(3)]
    batch, _ = pick(tasks, idle=True)
    assert batch == [tasks[0], tasks[2]]


def test_a_full_batch_of_another_shape_does_not_wait_for_the_leader() -> None:
    tasks = [held(0), *(held(n, shape=B) for n in range(1, 5))]
    assert pick(tasks) == (tasks[1:], None)


def test_the_most_urgent_leads() -> None:
    low, normal, high = held(1, priority=2), held(2, priority=1, shape=B), held(3, priority=0)
    batch, _ = pick([low, normal, high], idle=True)
    assert batch == [high, low]


def test_an_old_low_task_overtakes() -> None:
    old = held(1, priority=2, shape=B)
    new = [held(n, priority=0, arrived_ms=AGING_MS + 1) for n in range(2, 6)]
    batch, _ = pick([*new, old], AGING_MS + 1)
    assert batch == [old]


def test_a_suspect_runs_alone_and_only_when_idle() -> None:
    suspect, other = held(1, alone=True), held(2)
    assert pick([suspect, other], 5.0, idle=False) == ([other], None)
    assert pick([suspect, other], idle=True) == ([suspect], None)


tasks_strategy = st.lists(
    st.builds(
        held,
        st.integers(1, 10**6),
        rows=st.integers(1, 4),
        shape=st.sampled_from([A, B]),
        priority=st.integers(0, 2),
        arrived_ms=st.floats(0, 3000),
        alone=st.booleans(),
    ),
    max_size=30,
)


@given(tasks_strategy, st.floats(0, 5000), st.booleans(), st.floats(0, 50))
def test_every_choice_keeps_the_rules(
    tasks: list[Held], now_ms: float, idle: bool, delay_ms: float
) -> None:
    batch, wake_ms = pick(tasks, now_ms, idle=idle, delay_ms=delay_ms)
    assert all(any(chosen is task for task in tasks) for chosen in batch)
    assert len({id(chosen) for chosen in batch}) == len(batch)
    assert sum(chosen.rows for chosen in batch) <= 4
    assert len({chosen.shape_key for chosen in batch}) <= 1
    if any(chosen.alone for chosen in batch):
        assert len(batch) == 1
        assert idle
    if batch:
        assert wake_ms is None
    elif wake_ms is not None:
        assert wake_ms > now_ms
    if idle and tasks:
        assert batch
    runnable = [task for task in tasks if not task.alone]
    if any(now_ms - task.arrived_ms >= delay_ms for task in runnable):
        assert batch


@given(tasks_strategy)
def test_idle_slots_empty_any_pile(tasks: list[Held]) -> None:
    left = list(tasks)
    for _ in range(len(tasks)):
        batch, _ = pick(left, idle=True)
        left = [task for task in left if not any(task is chosen for chosen in batch)]
    assert not left
