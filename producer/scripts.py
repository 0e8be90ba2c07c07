"""The Lua scripts of the queue, read from the files beside this one."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_BELL, _RATE, _ADD, _KEY = "_bell.lua", "_rate.lua", "_add.lua", "_key.lua"
#: What a script needs besides the bell rule.
_SHARED = {
    "add": (_RATE, _ADD),
    "add_keyed": (_RATE, _ADD),
    "free_keys": (_KEY,),
    "settle": (_KEY,),
}


@cache
def script(name: str) -> str:
    """The text of `lua/<name>.lua` with the shared functions in front."""
    return shared(_BELL, *_SHARED.get(name, ()), f"{name}.lua")


def shared(*names: str) -> str:
    """The texts of these files in `lua`, joined."""
    folder = files("producer") / "lua"
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)
