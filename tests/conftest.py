"""Fixtures: a fresh real Redis a module, and clients on it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import redis

from producer.embedded import EmbeddedRedis

# A shell that starts the tests in the background ignores SIGINT for them and all their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A fresh embedded redis-server for the module."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    """A connection to an emptied database."""
    with redis.Redis.from_url(redis_url, protocol=2) as made:
        made.flushdb()
        yield made
