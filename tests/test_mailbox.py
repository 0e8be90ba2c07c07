"""The client's mailbox: no ticket waits longer than its deadline, whatever the connection does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from producer.errors import DeadlineExceeded, TrtqError
from producer.mailbox import Mailbox
from producer.ticket import Ticket
from tests.support.processes import until


class DeafLink:
    """A connection that is open and dead: no call returns before the test ends."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.calls: list[Any] = []

    def call(self, *command: Any) -> Any:
        self.calls.append(command[0])
        self.over.wait(60)
        raise ConnectionError("the test is over")

    def script(self, name: str, script_keys: object, args: object) -> list[bytes]:
        """The client's first look succeeds; then the connection dies."""
        self.calls.append(name)
        if self.calls.count(name) > 2:
            raise ConnectionError("the connection is dead")
        return []


@pytest.fixture
def link() -> Iterator[DeafLink]:
    made = DeafLink()
    yield made
    made.over.set()


def ticket(deadline_s: float) -> Ticket:
    return Ticket("c-1", "m", 1, True, deadline_s, None, threading.Lock())  # type: ignore[arg-type]


def test_a_deadline_is_kept_while_the_reader_waits_for_a_dead_connection(link: DeafLink) -> None:
    mailbox = Mailbox(link, "c", time.monotonic, grace_s=0.0)  # type: ignore[arg-type]
    mailbox.start()
    waits = ticket(time.monotonic() + 0.1)
    other = ticket(time.monotonic() + 600)
    other.task_id = other.reply_id = "c-2"
    mailbox.expect(waits)
    mailbox.expect(other)
    assert isinstance(waits.exception(10), DeadlineExceeded)
    assert link.calls[-1] == "BLMOVE", "the reader is still in its first wait"
    assert not other.done()
    link.over.set()
    until(lambda: link.calls.count("replies") > 3)
    mailbox.close()
    assert other.done()
    assert "LTRIM" not in link.calls, "a dead connection is not waited for once more"


def test_a_watch_that_dies_fails_the_tickets(link: DeafLink) -> None:
    def clock() -> float:
        if threading.current_thread().name == "trtq-deadlines":
            raise ZeroDivisionError("the clock broke")
        return time.monotonic()

    mailbox = Mailbox(link, "c", clock)  # type: ignore[arg-type]
    mailbox.start()
    waits = ticket(time.monotonic() + 600)
    mailbox.expect(waits)
    error = waits.exception(10)
    assert isinstance(error, TrtqError)
    assert "ZeroDivisionError" in error.message
    link.over.set()
    mailbox.close()
