"""How Celery reaches the same Redis: its own forms of URL and of TLS options."""

from __future__ import annotations

import ssl
from typing import Any, NamedTuple
from urllib.parse import quote

from redis.connection import parse_url

from producer.address import redact
from producer.errors import ConfigError


class Broker(NamedTuple):
    """`url` without options, and for TLS the options of `broker_use_ssl`."""

    url: str
    use_ssl: dict[str, Any] | None


def broker_of(url: str) -> Broker:
    """The Redis at `url` as a broker; raises ConfigError for a URL that Celery cannot use."""
    try:
        parts = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError:
        # Its text may hold a part of a password.
        raise ConfigError(f"Redis URL {redact(url)!r} cannot be read") from None
    if url.startswith("unix://"):
        raise ConfigError(
            f"Redis URL {redact(url)!r}: Celery's workers reach Redis over TCP; write redis:// or "
            "rediss://"
        )
    login = quote(parts.get("username", ""), safe="")
    if "password" in parts:
        login += f":{quote(parts['password'], safe='')}"
    host = parts.get("host", "localhost")
    if ":" in host:
        host = f"[{host}]"
    place = f"{host}:{parts.get('port', 6379)}/{parts.get('db', 0)}"
    scheme = url.partition("://")[0]
    made = f"{scheme}://{login}@{place}" if login else f"{scheme}://{place}"
    if scheme != "rediss":
        return Broker(made, None)
    options = {name: value for name, value in parts.items() if name.startswith("ssl_")}
    # Without these, Celery encrypts and checks no certificate.
    return Broker(made, {**options, "ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True})
