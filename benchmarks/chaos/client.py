"""A client process of the load: submits at a rate, checks every answer, counts replies.

Takes orders as JSON lines (see benchmarks.peers.loops.obey): `load`, then `finish`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.chaos import stepped_clock

stepped_clock.install()

from benchmarks.chaos.model import (  # noqa: E402 - the clock is patched before anything reads it
    NAME,
    WIDTH,
    checksum,
    poison_id,
)
from benchmarks.peers.loops import obey  # noqa: E402
from producer import Client  # noqa: E402
from producer.errors import TrtqError  # noqa: E402
from producer.mailbox import Mailbox  # noqa: E402
from producer.ticket import Ticket  # noqa: E402
from producer.wire import decode_replies  # noqa: E402

#: A ticket must have ended this long after its deadline: the client's grace and a noisy machine.
_LATE_S = 2.0 + 1.5


class Wire:
    """Replies that reached this client's list, by task.

    The reader hands on each element of the list once: what it read it removes by name, and what
    it reads again after a lost answer it had not handed on.
    """

    def __init__(self) -> None:
        self.replies: Counter[str] = Counter()

    def install(self) -> None:
        """Listens to every mailbox of this process."""
        deliver, wire = Mailbox._deliver, self

        def listen(mailbox: Mailbox, blob: bytes) -> None:
            wire.replies.update(reply.task_id for reply in decode_replies(blob))
            deliver(mailbox, blob)

        Mailbox._deliver = listen  # type: ignore[method-assign]


class Sent:
    """One accepted task, and when and how often its ticket ended."""

    def __init__(self, ticket: Ticket, number: int, poison: str | None, expected: int) -> None:
        self.ticket, self.number, self.poison, self.expected = ticket, number, poison, expected
        self.submitted_s = time.monotonic()
        self.ended_s = 0.0
        self.ends = 0
        ticket.add_done_callback(self._ended)

    def _ended(self, ticket: Ticket) -> None:
        self.ended_s = time.monotonic()
        self.ends += 1


class Load:
    """The orders of one client process."""

    def __init__(self, client: Client, seed: int, wire: Wire) -> None:
        self._client = client
        self._seed = seed
        self._random = np.random.default_rng(seed)
        self._wire = wire
        self._sent: list[Sent] = []
        self._refused: Counter[str] = Counter()
        self._number = 0

    def load(
        self,
        seconds: float,
        per_s: float,
        deadline_s: float,
        poison: str | None = None,
        poison_every: int = 50,
        poison_most: int = 1000,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Submits for `seconds`; every `poison_every`-th task is poison, at most `poison_most`."""
        started_s = time.monotonic()
        poisoned = 0
        for step in range(int(seconds * per_s)):
            wait_s = started_s + step / per_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            # Submits may block while Redis is away: what was missed is not made up for ever.
            if time.monotonic() > started_s + seconds + 1:
                break
            bad = poison if step % poison_every == 3 and poisoned < poison_most else None
            poisoned += bad is not None
            self._submit(bad, deadline_s, timeout_s)
        return {"seconds": time.monotonic() - started_s}

    def _submit(self, poison: str | None, deadline_s: float, timeout_s: float | None) -> None:
        self._number += 1
        number = self._seed * 10_000_000 + self._number
        if poison is not None:
            number = poison_id(poison, number)
        row = self._random.integers(0, 256, WIDTH, dtype=np.uint8)
        inputs = {"x": row, "id": np.int64(number)}
        try:
            ticket = self._client.submit(NAME, inputs, deadline=deadline_s, timeout=timeout_s)
        except TrtqError as error:
            self._refused[error.code] += 1
            return
        self._sent.append(Sent(ticket, number, poison, checksum(row, number)))

    def wait(self, seconds: float) -> int:
        """Waits until every ticket has ended, for at most `seconds`; returns how many have not."""
        give_up_s = time.monotonic() + seconds
        for sent in self._sent:
            try:
                sent.ticket.exception(max(0.0, give_up_s - time.monotonic()))
            except TrtqError:
                pass
        return sum(not sent.ticket.done() for sent in self._sent)

    def finish(self) -> dict[str, Any]:
        """What became of every accepted task."""
        total: Counter[str] = Counter()
        named: Counter[str] = Counter()
        unanswered: Counter[str] = Counter()
        poisons: Counter[str] = Counter()
        latencies_ms: list[float] = []
        late_s = 0.0
        for sent in self._sent:
            ticket = sent.ticket
            if not ticket.done():
                total["hung"] += 1
                continue
            late = sent.ended_s - ticket.deadline_s
            late_s = max(late_s, late)
            total["hung"] += late > _LATE_S
            replies = self._wire.replies[ticket.task_id]
            total["twice"] += replies > 1 or sent.ends > 1
            error = ticket.exception(0)
            if sent.poison is not None:
                poisons[error.code if error else "answered"] += 1
                total["wrong"] += error is None
                total["once"] += error is not None and replies == 1
            elif error is None:
                result = ticket.result(0)
                right = (int(result["sum"]), int(result["echo"])) == (sent.expected, sent.number)
                total["wrong"] += not right
                total["once"] += right and replies <= 1
                latencies_ms.append(1000 * (sent.ended_s - sent.submitted_s))
            elif replies:
                named[error.code] += 1
            else:
                unanswered[error.code] += 1
        ordered = sorted(latencies_ms) or [0.0]
        return {
            "accepted": len(self._sent),
            "refused": dict(self._refused),
            "once": total["once"],
            "twice": total["twice"],
            "wrong": total["wrong"],
            "hung": total["hung"],
            "named": dict(named),
            "unanswered": dict(unanswered),
            "poisons": dict(poisons),
            "late_s": round(late_s, 3),
            "p50_ms": round(ordered[len(ordered) // 2], 1),
            "max_ms": round(ordered[-1], 1),
            "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("trtq")),
        }


def main() -> None:
    wire = Wire()
    wire.install()
    with Client(os.environ["CHAOS_URL"], name="chaos") as client:
        load = Load(client, int(os.environ["CHAOS_SEED"]), wire)
        obey({"load": load.load, "wait": load.wait, "finish": load.finish})


if __name__ == "__main__":
    main()
