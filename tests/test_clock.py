"""The clock of Redis' machine is stepped by an hour: no mark and no lease outlives its worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from producer.link import Link
from tests.support.processes import until
from tests.support.specs import SPEC
from tests.support.stepped_redis import stepped_redis
from workers.inbox import WorkerInbox

HOUR_S = 3600
LEASE_MS = 500
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


class Stepped:
    """A Redis with a queue, and its clock."""

    def __init__(self, connection: redis.Redis, clock: Path) -> None:
        self.connection = connection
        self.inbox = WorkerInbox(Link(connection), "m")
        self._clock = clock
        self._flush = 0

    def now_s(self) -> int:
        return int(self.connection.time()[0])

    def step(self, seconds: int) -> None:
        before = self.now_s()
        self._clock.write_text(str(seconds))
        until(lambda: abs(self.now_s() - before) > HOUR_S / 2)

    def add(self) -> bool:
        self._flush += 1
        return self.inbox.add(SPEC, 1, "c", self._flush, [(1, b"x")])[0]


@pytest.fixture
def stepped(tmp_path: Path) -> Iterator[Stepped]:
    clock = tmp_path / "clock"
    server = stepped_redis(clock)
    with closing(server), redis.Redis.from_url(server.url, protocol=2) as connection:
        yield Stepped(connection, clock)


def test_marks_of_the_future_cover_no_work(stepped: Stepped) -> None:
    stepped.inbox.attend("dead", 5000)
    assert stepped.add()
    stepped.inbox.enter("dead", 1)
    assert not stepped.add(), "a turn covers it"
    stepped.step(-HOUR_S)
    state = stepped.inbox.look()
    assert (state.turns, state.bells, state.workers) == (0, 0, 0)
    assert stepped.add(), "nobody covers it"
    stepped.inbox.enter("lives", 0)
    assert stepped.inbox.look().turns == 1
    stepped.inbox.attend("lives", 5000)
    assert stepped.inbox.look().workers == 1


def test_a_turn_and_a_worker_that_live_count_again_after_a_step(stepped: Stepped) -> None:
    stepped.add()
    for step_s in (HOUR_S, -HOUR_S):
        (entry,) = stepped.inbox.enter("w", 1).entries
        stepped.inbox.attend("w", 5000)
        stepped.step(step_s)
        assert stepped.inbox.renew("w", [entry]) == frozenset()
        stepped.inbox.attend("w", 5000)
        state = stepped.inbox.look()
        assert (state.turns, state.workers) == (1, 1)
        # Renewed by the new clock, so nobody else takes it.
        assert stepped.inbox.reclaim("other", LEASE_MS, 9, 3, False).entries == []
        assert stepped.inbox.sweep(LEASE_MS) == 0
        assert stepped.inbox.release("w", [entry], LEASE_MS) == 1
        (taken,) = stepped.inbox.reclaim("w", LEASE_MS, 9, 3, False).entries
        stepped.inbox.release("w", [taken], LEASE_MS)
        stepped.connection.xgroup_destroy(stepped.inbox.keys.normal, "workers")
        stepped.inbox.ensure_groups()


def test_a_lease_of_the_future_runs_out(stepped: Stepped) -> None:
    stepped.add()
    stepped.add()
    (first,) = stepped.inbox.claim("dead", 1).entries
    (second,) = stepped.inbox.claim("stopped", 1).entries
    stepped.inbox.release("stopped", [second], LEASE_MS)
    stepped.step(-HOUR_S)
    assert stepped.inbox.reclaim("w", LEASE_MS, 9, 3, False).entries == []
    stepped.inbox.attend("w", 5000)
    stepped.inbox.sweep(LEASE_MS)
    taken = stepped.inbox.reclaim("w", LEASE_MS, 9, 3, False).entries
    assert [(entry.entry_id, entry.deliveries) for entry in taken] == [
        (first.entry_id, 1),
        (second.entry_id, 0),
    ]
