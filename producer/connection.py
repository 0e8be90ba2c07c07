"""Connections to Redis, and its errors as ours."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError
from redis.retry import Retry

from producer.address import check_tls, redact, user_of
from producer.errors import (
    AccessDenied,
    ConfigError,
    RedisFull,
    RedisUnavailable,
    TlsFailed,
    TrtqError,
)

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

_RETRY_S = 1.0
_SSL_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


class _Redis(redis.Redis):
    """Says which command a user may not run: Redis does not name the key."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except NoPermissionError as failure:
            raise NoPermissionError(f"{failure} ({' '.join(map(str, args[:2]))})") from failure


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """A client for `url` that answers bytes. It connects at the first command.

    Its calls raise after `timeout_s` without an answer and never retry by themselves: what may
    be repeated safely is the caller's knowledge. A rediss:// server's certificate is always
    checked. Raises ConfigError for a URL that is none or that would not check it.
    """
    check_tls(url)
    try:
        return _Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            socket_keepalive=True,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
        )
    except ValueError:
        # Its text may hold a part of a password.
        raise ConfigError(
            f"Redis URL {redact(url)!r} cannot be read; write it as "
            "redis://[[user]:password@]host:port/db (rediss:// for TLS), signs of the password "
            "like / ? # @ % as %2F %3F %23 %40 %25"
        ) from None


def wait_until_answers(
    url: str, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Returns once Redis at `url` answers, however long that takes; `say` is told once of a wait.

    Raises ConfigError, AccessDenied, TlsFailed: what waiting does not mend.
    """
    waiting = False
    with connect(url) as connection:
        while True:
            try:
                with named_errors(url):
                    connection.ping()
                return
            except RedisUnavailable as failure:
                if not waiting:
                    say(f"waiting: {failure.message}")
                waiting = True
            sleep(_RETRY_S)


@contextmanager
def named_errors(url: str) -> Iterator[None]:
    """Turns redis-py's errors into ours that name `url` redacted.

    A lost connection becomes RedisUnavailable, a refused login or command AccessDenied, a server
    that cannot be trusted TlsFailed, one that is no Redis or lacks the database ConfigError.
    """
    try:
        yield
    except AuthenticationError as failure:
        raise AccessDenied(
            f"Redis at {redact(url)} refused the login of user {user_of(url) or 'default'!r}: "
            f"{failure}; name a user in TRTQ_REDIS_URL and its password's file in "
            "TRTQ_REDIS_PASSWORD_FILE"
        ) from failure
    except NoPermissionError as failure:
        raise access_denied(failure, url) from failure
    except redis.exceptions.OutOfMemoryError as failure:
        raise redis_full(failure) from failure
    except TrtqError:
        # Named already; some are of Python's own TimeoutError too.
        raise
    except LINK_ERRORS as failure:
        untrusted = _tls_error(failure)
        if untrusted is not None:
            raise _tls_failed(untrusted, url) from failure
        tls = "; does it speak TLS on that port, does it want our certificate (TRTQ_REDIS_CERT)?"
        raise RedisUnavailable(
            f"Redis at {redact(url)} does not answer ({failure})"
            f"{tls if url.startswith('rediss://') else ''}; "
            "start it (`trtq redis` runs an embedded one) or set TRTQ_REDIS_URL"
        ) from failure
    except redis.exceptions.InvalidResponse as failure:
        raise ConfigError(
            f"what answers at {redact(url)} is no Redis ({failure}); give the host and port of one "
            "in TRTQ_REDIS_URL"
        ) from failure
    except redis.exceptions.ResponseError as failure:
        if "DB index" not in str(failure):
            raise
        raise ConfigError(
            f"Redis at {redact(url)} has no database of that number ({failure}); end "
            "TRTQ_REDIS_URL with one that it has, as /0, or give it more `databases`"
        ) from failure


def redis_full(failure: Exception) -> RedisFull:
    """The error of a command that a Redis at `maxmemory` refused."""
    return RedisFull(
        f"Redis is at its maxmemory and took nothing ({failure}); try later, add workers, or give "
        "Redis more memory"
    )


def access_denied(failure: Exception, url: str = "") -> AccessDenied:
    """The error of a command or key that Redis' access rules refuse to the user of `url`."""
    text = str(failure)
    who = f"Redis at {redact(url)} denies user {user_of(url) or 'default'!r}" if url else "denied"
    if "trtq:reply:" in text:
        remedy = (
            "a user reads the replies of its own client name only: set TRTQ_CLIENT_NAME to the "
            "name in its rules"
        )
    else:
        remedy = "connect as a user of the right role, or give it the rules that `trtq acl` prints"
    return AccessDenied(f"{who}: {text}; {remedy}")


def _tls_error(failure: BaseException | None) -> ssl.SSLError | None:
    while failure is not None:
        # A server that goes away in the middle of TLS is not one that cannot be trusted.
        if isinstance(failure, ssl.SSLError) and not isinstance(failure, _SSL_ENDED):
            return failure
        failure = failure.__cause__ or failure.__context__
    return None


def _tls_failed(failure: ssl.SSLError, url: str) -> TlsFailed:
    reason = getattr(failure, "verify_message", "") or failure.reason or str(failure)
    if "match" in reason:
        remedy = "connect by a name that is in the certificate"
    elif isinstance(failure, ssl.SSLCertVerificationError):
        remedy = "name the file of the CA that signed it in TRTQ_REDIS_CA"
    elif failure.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        remedy = "that port speaks no TLS: give the port of Redis' `tls-port`"
    else:
        remedy = (
            "a Redis with `tls-auth-clients yes` asks for a certificate: TRTQ_REDIS_CERT and "
            "TRTQ_REDIS_KEY"
        )
    return TlsFailed(f"Redis at {redact(url)} cannot be trusted ({reason}): {remedy}")
