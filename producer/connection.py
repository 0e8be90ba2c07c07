"""Connections to Redis, and its errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.config import redact
from producer.errors import ConfigError, RedisFull, RedisUnavailable

#: What a lost, refused or stalled connection raises, and a server that is loading or full.
LINK_ERRORS = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    OSError,
)

#: The same, and what passes on a server that answers: a full disk, a failover, a busy script.
PASSING_ERRORS = (*LINK_ERRORS, redis.exceptions.ResponseError)


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """A client for `url` that answers bytes. It connects at the first command.

    Its calls raise after `timeout_s` without an answer and never retry by themselves: what may
    be repeated safely is the caller's knowledge. Raises ConfigError for a URL that is none.
    """
    try:
        return redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
        )
    except ValueError as failure:
        raise ConfigError(
            f"Redis URL {redact(url)!r}: {failure}; write it as redis://[:password@]host:port/db"
        ) from None


@contextmanager
def named_errors(url: str) -> Iterator[None]:
    """Turns redis-py's connection errors into RedisUnavailable that names `url` redacted."""
    try:
        yield
    except redis.exceptions.AuthenticationError as failure:
        raise ConfigError(f"Redis at {redact(url)} refused the login: {failure}") from failure
    except redis.exceptions.OutOfMemoryError as failure:
        raise redis_full(failure) from failure
    except LINK_ERRORS as failure:
        raise RedisUnavailable(
            f"Redis at {redact(url)} does not answer ({failure}); "
            "start it (`trtq redis` runs an embedded one) or set TRTQ_REDIS_URL"
        ) from failure


def redis_full(failure: Exception) -> RedisFull:
    """The error of a command that a Redis at `maxmemory` refused."""
    return RedisFull(
        f"Redis is at its maxmemory and took nothing ({failure}); try later, add workers, or give "
        "Redis more memory"
    )
