"""Settings of the producer side, from arguments or `TRTQ_*` environment variables."""

from __future__ import annotations

import os
import re
from typing import Any

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from producer import address
from producer.address import DEFAULT_URL
from producer.errors import ConfigError

_YEAR_S = 365 * 86_400


def wrong_setting(failure: ValidationError) -> ConfigError:
    """The error of settings that were read from the environment: names the first wrong variable."""
    wrong = failure.errors(include_url=False)[0]
    name = "TRTQ_" + "_".join(map(str, wrong["loc"])).upper()
    return ConfigError(f"{name}={wrong['input']!r}: {wrong['msg']}")


class RedisSettings(BaseSettings):
    """Where Redis is. Environment names are `TRTQ_` plus the field in capitals.

    Once made, `redis_url` holds all that connecting needs, also what the files named by the other
    fields hold. A `redis_url` from code goes before the environment's URL or URL file, and takes
    from the rest what it lacks. Raises ConfigError for contradictions and unusable files.
    """

    model_config = SettingsConfigDict(env_prefix="TRTQ_", frozen=True, extra="ignore")

    redis_url: str = Field(default=DEFAULT_URL, repr=False)
    #: File that holds the URL.
    redis_url_file: str = ""
    #: File that holds the password of the URL's user.
    redis_password_file: str = ""
    #: File of the certificates (PEM) that may sign Redis' own; without it, the system's.
    redis_ca: str = ""
    #: Client certificate and key (PEM), for a Redis that asks for them.
    redis_cert: str = ""
    redis_key: str = ""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: dict[str, Any]) -> dict[str, Any]:
        given = data.get("redis_url")
        file = data.get("redis_url_file")
        from_environment = os.environ.get("TRTQ_REDIS_URL")
        if file and from_environment:
            raise ConfigError("TRTQ_REDIS_URL and TRTQ_REDIS_URL_FILE are both set: keep one")
        in_code = bool(given) and given != from_environment
        if file and not in_code:
            given = address.read_secret(file, "TRTQ_REDIS_URL_FILE")
        return {**data, "redis_url": _complete(given or DEFAULT_URL, data, strict=not in_code)}

    def url_for(self, redis_url: str | None) -> str:
        """`redis_url` with what it lacks; without one, the settings' own."""
        if not redis_url:
            return self.redis_url
        return _complete(redis_url, self.model_dump(), strict=False)


def _complete(url: str, data: dict[str, Any], *, strict: bool) -> str:
    file = data.get("redis_password_file")
    return address.complete(
        url,
        password=address.read_secret(file, "TRTQ_REDIS_PASSWORD_FILE") if file else "",
        ca=data.get("redis_ca") or "",
        cert=data.get("redis_cert") or "",
        key=data.get("redis_key") or "",
        strict=strict,
    )


class ProducerSettings(RedisSettings):
    """What a client needs to know."""

    #: First part of the client's id, by which access rules know its replies: letters, digits, `_`
    #: and `-`. Without one, the user of the Redis URL, or "client".
    client_name: str = ""
    #: A task without a deadline of its own gets this one; nothing waits for ever.
    default_deadline_s: float = Field(default=600.0, gt=0, le=_YEAR_S)
    #: How long `submit` may wait for room in a full queue when it names no timeout.
    default_timeout_s: float = Field(default=60.0, ge=0, le=_YEAR_S)
    #: Tasks that may wait inside the client to be sent, also those that a full queue refused.
    client_max_unsent: int = Field(default=10_000, ge=1, le=10**9)
    #: How long a stored result is kept.
    store_s: int = Field(default=3600, ge=1, le=10 * _YEAR_S)
    #: How long an idempotency key is remembered when `submit` names no window.
    key_window_s: float = Field(default=3600.0, gt=0, le=10 * _YEAR_S)
    #: How long a published model spec is trusted before it is read again.
    spec_ttl_s: float = Field(default=5.0, ge=0, le=_YEAR_S)
    #: How long connecting to Redis may take at start.
    connect_timeout_s: float = Field(default=5.0, gt=0, le=3600)
    #: Make spans of OpenTelemetry for submitted tasks; needs the extra `tracing`.
    tracing: bool = False

    def name_at(self, redis_url: str, fallback: str) -> str:
        """The configured client name, else the user of `redis_url` as far as it is a name."""
        user = re.sub(r"[^A-Za-z0-9_-]", "", address.user_of(redis_url))
        return self.client_name or ("" if user == "default" else user) or fallback
