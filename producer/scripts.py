"""The Lua scripts of the queue, read from the files beside this one."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

_COMMON = "_bell.lua"


@cache
def script(name: str) -> str:
    """The text of `lua/<name>.lua` with the shared functions in front."""
    folder = files("producer") / "lua"
    common = (folder / _COMMON).read_text(encoding="utf-8")
    return common + (folder / f"{name}.lua").read_text(encoding="utf-8")
