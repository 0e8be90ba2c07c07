"""Settings of the producer side, from arguments or `TRTQ_*` environment variables."""

from __future__ import annotations

import re

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

_QUERY_PASSWORD = re.compile(r"([?&]password=)[^&]*", re.IGNORECASE)


class ProducerSettings(BaseSettings):
    """What a client needs to know. Environment names are `TRTQ_` plus the field in capitals."""

    model_config = SettingsConfigDict(env_prefix="TRTQ_", frozen=True, extra="ignore")

    redis_url: str = Field(default="redis://127.0.0.1:6379/0", repr=False)
    #: A task without a deadline of its own gets this one; nothing waits for ever.
    default_deadline_s: float = Field(default=600.0, gt=0)
    #: How long `submit` may wait for room in a full queue when it names no timeout.
    default_timeout_s: float = Field(default=60.0, ge=0)
    #: Tasks that may wait inside the client for the sender thread.
    client_max_unsent: int = Field(default=10_000, ge=1)
    #: How long a stored result is kept.
    store_s: int = Field(default=3600, ge=1)
    #: How long a published model spec is trusted before it is read again.
    spec_ttl_s: float = Field(default=5.0, ge=0)
    #: How long connecting to Redis may take at start.
    connect_timeout_s: float = Field(default=5.0, gt=0)
    #: Make spans of OpenTelemetry for submitted tasks; needs the extra `tracing`.
    tracing: bool = False


def redact(url: str) -> str:
    """The URL with its passwords replaced, fit for logs and messages.

    All between the user's name and the last @ counts as password: one that holds `/`, `?` or `@`
    unescaped makes a wrong URL, which is then printed.
    """
    scheme, mark, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    if ":" in login:
        login = f"{login.partition(':')[0]}:***"
    shown = _QUERY_PASSWORD.sub(r"\1***", place)
    return f"{scheme}{mark}{login}{at}{shown}"
