"""The Lua scripts of the queue, read from the files beside this one."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

#: Shared functions, in front of every script, and those only of scripts that handle dead letters.
_COMMON = "_bell"
_DEAD = "_dead"
_OF_DEAD_LETTERS = frozenset({"settle", "drop", "requeue"})


@cache
def script(name: str) -> str:
    """The text of `lua/<name>.lua` with the shared functions in front."""
    folder = files("producer") / "lua"
    parts = (_COMMON, _DEAD, name) if name in _OF_DEAD_LETTERS else (_COMMON, name)
    return "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
