"""The Lua scripts of the queue, read from the files beside this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgpack

_BELL, _DEAD, _RATE, _ADD, _KEY = "_bell.lua", "_dead.lua", "_rate.lua", "_add.lua", "_key.lua"
#: What a script needs besides the bell rule.
_SHARED = {
    "add": (_RATE, _ADD),
    "add_keyed": (_KEY, _RATE, _ADD),
    "cancel": (_KEY,),
    "drop": (_DEAD,),
    "free_keys": (_KEY,),
    "requeue": (_DEAD,),
    "settle": (_DEAD, _KEY),
}


@cache
def script(name: str) -> str:
    """The text of `lua/<name>.lua` with the shared functions in front."""
    return shared(_BELL, *_SHARED.get(name, ()), f"{name}.lua")


def shared(*names: str) -> str:
    """The texts of these files in `lua`, joined."""
    folder = files("producer") / "lua"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def packed(values: Sequence[Any] | Mapping[Any, Any]) -> bytes:
    """Several values as one argument of a script, in msgpack."""
    # Redis' own msgpack knows no separate type for bytes.
    data: bytes = msgpack.packb(values, use_bin_type=False)
    return data
