"""Text that came from the wire, made fit for a log line or a terminal."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9._:@/+-]+")


def shown_name(name: str, most: int = 200) -> str:
    """A task id or worker name as it is if it is plain, else quoted and escaped; bounded."""
    short = name[:most]
    return short if short == name and _NAME.fullmatch(name) else ascii(short)


def one_line(text: str, most: int = 500) -> str:
    """`text` without line breaks and control characters, cut after `most` characters."""
    short = text if len(text) <= most else f"{text[:most]}..."
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)
