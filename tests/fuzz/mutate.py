"""Mutations of known inputs: what a fuzzer without a view of the code can do."""

from __future__ import annotations

import random

_NUMBERS = (
    b"\x00",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff\xff\xff\xff\xff",
)
#: What begins a value of msgpack, JSON, YAML, zip or .npy.
_TOKENS = (
    *(bytes([code]) for code in (0x80, 0x81, 0x90, 0x91, 0xA0, 0xC0, 0xC1, 0xC4, 0xC7, 0xCA, 0xD9)),
    b"\xdc\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"[", b"]", b"{", b"}", b'"', b":", b",", b"\n", b"- ", b"&a ", b"*a", b"<<: ", b"!!", b"'",
    b"#", b"null", b"true", b"1e999", b"-1", b"9" * 400, b"NaN", b"0x", b"2001-99-99", b"\\ud800",
    b"PK", b"(", b")", b"<f8", b"|O", b"True", b"done ", b"boot ", b"sync\n", b"finished\n", b"999",
)  # fmt: skip


def mutate(data: bytes, seeds: list[bytes], chance: random.Random, most_bytes: int) -> bytes:
    """`data` changed at a few places, never longer than `most_bytes`."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        place = chance.randrange(len(found) + 1)
        span = min(chance.choice((1, 1, 2, 4, 16, 64)), len(found) - place)
        kind = chance.randrange(8)
        if kind == 0 and found:
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
        elif kind == 1 and found:
            found[chance.randrange(len(found))] = chance.randrange(256)
        elif kind == 2:
            del found[place : place + span]
        elif kind == 3:
            found[place:place] = found[place : place + span] * chance.choice((1, 2, 50))
        elif kind == 4:
            found[place : place + span] = chance.choice(_NUMBERS)
        elif kind == 5:
            found[place:place] = chance.choice(_TOKENS) * chance.choice((1, 1, 1, 200))
        elif kind == 6:
            other = chance.choice(seeds)
            start = chance.randrange(len(other) + 1)
            found[place : place + span] = other[start : start + chance.randrange(64)]
        else:
            del found[place:]
    return bytes(found[:most_bytes])
