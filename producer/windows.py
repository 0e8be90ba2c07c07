"""Many tasks with a bounded number under way, for `Client.map` and `Client.as_completed`."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from producer.errors import InvalidInput
from producer.ticket import Ticket

Submit = Callable[[Any], Ticket]


def in_order(submit: Submit, iterable: Iterable[Any], window: int) -> Iterator[Any]:
    """Results in input order. The first error ends the iteration and cancels what is open."""
    tickets: deque[Ticket] = deque()
    items = iter(iterable)
    try:
        for item in itertools.islice(items, check_window(window)):
            tickets.append(submit(item))
        while tickets:
            result = tickets.popleft().result()
            for item in itertools.islice(items, 1):
                tickets.append(submit(item))
            yield result
    finally:
        for ticket in tickets:
            ticket.cancel()


def as_completed(submit: Submit, iterable: Iterable[Any], window: int) -> Iterator[tuple[int, Any]]:
    """(index, result) as they come. The first error ends it and cancels what is open."""
    ended: deque[Ticket] = deque()
    wake = threading.Semaphore(0)
    open_tickets: dict[str, tuple[int, Ticket]] = {}

    def on_done(ticket: Ticket) -> None:
        ended.append(ticket)
        wake.release()

    items = enumerate(iterable)
    try:
        left = check_window(window)
        while True:
            for index, item in itertools.islice(items, left):
                ticket = submit(item)
                open_tickets[ticket.reply_id] = index, ticket
                ticket.add_done_callback(on_done)
            if not open_tickets:
                return
            wake.acquire()
            ticket = ended.popleft()
            left = 1
            index, _ = open_tickets.pop(ticket.reply_id)
            yield index, ticket.result()
    finally:
        for _, ticket in open_tickets.values():
            ticket.cancel()


def check_window(window: int) -> int:
    """`window` as given; raises InvalidInput if it is less than 1."""
    if window < 1:
        raise InvalidInput(f"window {window!r}: use 1 or more")
    return window
