"""Values of others in messages: shortened, and without what would steer a terminal."""

from __future__ import annotations

import re
import reprlib

_LONG_INT_BITS = 256
_NAME = re.compile(r"[A-Za-z0-9._:@/+-]+")


class _Quoter(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxtuple = self.maxlist = self.maxdict = 8
        self.maxset = self.maxfrozenset = 8
        self.maxstring = 200
        self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out integers of thousands of digits.
        if x.bit_length() > _LONG_INT_BITS:
            return f"<an integer of {x.bit_length()} bits>"
        return repr(x)

    def repr_bytes(self, x: bytes, level: int) -> str:
        return self.repr_str(x, level)  # type: ignore[arg-type]

    def repr_str(self, x: str, level: int) -> str:
        if len(x) <= self.maxstring:
            return repr(x)
        return f"{x[: self.maxstring]!r} and {len(x) - self.maxstring} more"


_QUOTER = _Quoter()


def quoted(value: object) -> str:
    """The repr of `value`, of at most a few thousand characters whatever its size or nesting."""
    return _QUOTER.repr(value)


def printable(text: str) -> str:
    """`text` with every character that is not printable, but for newlines, replaced."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


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
