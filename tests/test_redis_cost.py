"""The benchmark of Redis' cost counts what travels; how long it takes is not tested."""

from __future__ import annotations

import redis

from benchmarks.redis_cost import LOADS, Load, Subject


def test_bytes_and_commands_are_counted_for_each_task(connection: redis.Redis) -> None:
    with Subject(connection) as subject:
        single = subject.cost(Load(10_000, 100, 1, False), 0.01)
        many = subject.cost(Load(10_000, 100, 64, False), 0.01)
        answered = subject.cost(Load(1_000, 20_000, 4, False), 0.01)
        reference = subject.cost(Load(0, 0, 4, False), 0.01)
    # Once in and once out, with less around it where a call carries more tasks.
    assert 10_000 < many.in_bytes < 10_600
    assert 10_000 < many.out_bytes < 10_600
    assert many.in_bytes < single.in_bytes < 14_000
    assert many.commands * 4 < single.commands
    assert answered.in_bytes > 21_000
    assert answered.out_bytes > 21_000
    assert reference.in_bytes < 1_500
    assert all(cost.cpu_us > 0 for cost in (single, many, answered, reference))


def test_loads_have_names_of_their_own() -> None:
    assert len({load.key for load in LOADS}) == len(LOADS)
