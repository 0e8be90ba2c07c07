"""A trtq client: single submits through the public `Client`, one ticket a request."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from benchmarks.peers.loops import PAYLOADS, Loops, WrongAnswer, obey
from producer import Client
from producer.connection import connect
from producer.inbox import Inbox
from producer.link import Link
from producer.ticket import Ticket

_TIMEOUT_S = 30
_ROWS = [np.frombuffer(payload, np.uint8) for payload in PAYLOADS]


def main() -> None:
    url, model = os.environ["BENCH_REDIS_URL"], os.environ["BENCH_MODEL"]
    inbox = Inbox(Link(connect(url)), model)
    with Client(url) as client:

        def submit(i: int) -> Ticket:
            return client.submit(model, _ROWS[i])

        def finish(i: int, ticket: Ticket) -> None:
            if ticket.result(_TIMEOUT_S).tobytes() != PAYLOADS[i]:
                raise WrongAnswer(f"trtq answered request {i} with another result")

        def until_no_turn() -> None:
            give_up_s = time.monotonic() + _TIMEOUT_S
            while inbox.look().turns:
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"a turn on an idle queue did not end in {_TIMEOUT_S} s")
                time.sleep(0.02)

        loops = Loops(submit, finish)

        def idle(seconds: float) -> dict[str, Any]:
            return loops.serial(seconds, warm=1, pause=until_no_turn)

        obey({"saturate": loops.saturate, "serial": loops.serial, "idle": idle})


if __name__ == "__main__":
    main()
