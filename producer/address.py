"""Where Redis is and how to get in: one URL that holds all of it, and how to show that URL."""

from __future__ import annotations

import os
import re
import ssl
import stat
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote

from producer.errors import ConfigError

DEFAULT_URL = "redis://127.0.0.1:6379/0"

_QUERY_PASSWORD = re.compile(r"([?&][^=&]*password=)[^&]*", re.IGNORECASE)
#: A secret is a line; what is longer is the wrong file.
_MOST_SECRET_BYTES = 64 << 10
_TRUE = ("true", "yes", "1", "t", "y")


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


def user_of(url: str) -> str:
    """The Redis user in `url`; empty where it names none."""
    login = url.partition("://")[2].rpartition("@")[0]
    return unquote(login.partition(":")[0])


def has_password(url: str) -> bool:
    """True if `url` holds a password."""
    return redact(url) != url


def read_secret(path: str, setting: str) -> str:
    """The text of a secret's file without its last line break. `setting` is for messages.

    Files that everybody may read are accepted: that is how Kubernetes and Docker mount secrets.
    Raises ConfigError if it cannot be read, is empty, or may be written by everybody.
    """
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_SECRET_BYTES + 1).decode().rstrip("\r\n")
    except OSError as failure:
        raise ConfigError(f"{setting}={path!r} cannot be read: {failure.strerror}") from failure
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}={path!r} is no UTF-8 text") from None
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise ConfigError(f"{setting}={path!r} may be written by everybody: chmod o-w it")
    if not text or len(text) > _MOST_SECRET_BYTES or "\n" in text:
        raise ConfigError(f"{setting}={path!r} must hold exactly one line")
    return text


def complete(
    url: str,
    *,
    password: str = "",
    ca: str = "",
    cert: str = "",
    key: str = "",
    strict: bool = True,
) -> str:
    """`url` with a password and the files of TLS where it has none.

    With `strict` it must have none. Raises ConfigError for that, for files of TLS beside a URL
    that is not rediss://, and for what `check_tls` refuses.
    """
    if password:
        if not has_password(url):
            scheme, mark, rest = url.partition("://")
            login, _, place = rest.rpartition("@")
            url = f"{scheme}{mark}{login}:{quote(password, safe='')}@{place}"
        elif strict:
            raise ConfigError(
                f"Redis URL {redact(url)!r} has a password and TRTQ_REDIS_PASSWORD_FILE names "
                "another: keep one of them"
            )
    files = (
        ("CA", "ssl_ca_certs", ca),
        ("CERT", "ssl_certfile", cert),
        ("KEY", "ssl_keyfile", key),
    )
    for setting, option, path in files:
        if not path:
            continue
        if not url.startswith("rediss://"):
            raise ConfigError(
                f"TRTQ_REDIS_{setting} is set, but {redact(url)!r} is not encrypted: write rediss://"
            )
        if f"{option}=" not in url:
            url += f"{'&' if '?' in url else '?'}{option}={quote(path, safe='/')}"
        elif strict:
            raise ConfigError(
                f"Redis URL {redact(url)!r} has {option} and TRTQ_REDIS_{setting} is set: keep one"
            )
    check_tls(url)
    return url


def check_tls(url: str) -> None:
    """Raises ConfigError if `url` weakens TLS or names files that TLS cannot use."""
    query = {name: values[0] for name, values in parse_qs(url.partition("?")[2]).items()}
    weak = [
        name
        for name, value in query.items()
        if (name == "ssl_cert_reqs" and value.lower() not in ("required", "cert_required"))
        or (name == "ssl_check_hostname" and value.lower() not in _TRUE)
        or name == "ssl_exclude_verify_flags"
    ]
    if weak:
        raise ConfigError(
            f"Redis URL {redact(url)!r}: {weak[0]} would leave the server's certificate unchecked, "
            "so anybody between could read and change everything; remove it and name the file of "
            "the CA that signed the certificate in TRTQ_REDIS_CA"
        )
    if url.startswith("rediss://"):
        _check_files(query)


def _check_files(query: dict[str, str]) -> None:
    ca, cert = query.get("ssl_ca_certs"), query.get("ssl_certfile")
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as failure:
        raise ConfigError(f"the CA file {ca!r} of Redis' TLS cannot be used: {failure}") from None
    if cert:
        key = query.get("ssl_keyfile")
        try:
            context.load_cert_chain(cert, key, query.get("ssl_password"))
        except (OSError, ValueError) as failure:
            raise ConfigError(
                f"the client certificate {cert!r} with key {key!r} cannot be used: {failure}"
            ) from None
