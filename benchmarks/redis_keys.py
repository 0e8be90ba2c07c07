"""The keys that docs/architecture.md names, and what Redis holds beside them."""

from __future__ import annotations

import re
from typing import NamedTuple

import redis

from benchmarks.processes import ROOT

_DOCUMENT = ROOT / "docs" / "architecture.md"
_CODE = re.compile(r"`([^`]+)`")
_PLACE = re.compile(r"<[^>]+>|\{model\}")


class DocumentedKeys(NamedTuple):
    """Patterns of all keys, with their types, and of those that have no expiry."""

    types: dict[re.Pattern[str], str]
    lasting: list[re.Pattern[str]]

    def type_of(self, key: str) -> str | None:
        """The documented type; None for a key that the document does not name."""
        return next((kind for name, kind in self.types.items() if name.fullmatch(key)), None)

    def may_last(self, key: str) -> bool:
        """True if it may be there without an expiry."""
        return any(name.fullmatch(key) for name in self.lasting)


def documented_keys() -> DocumentedKeys:
    """What the table of keys and the paragraph after it say."""
    section = _DOCUMENT.read_text("utf-8").partition("\n## Redis keys\n")[2].partition("\n## ")[0]
    types: dict[re.Pattern[str], str] = {}
    for line in section.splitlines():
        cells = line.split(" | ")
        if line.startswith("| `") and cells[1] in _TYPES:
            types |= dict.fromkeys(_patterns(cells[0]), _TYPES[cells[1]])
    paragraph = section.partition("No expiry have")[2].partition("\n\n")[0]
    return DocumentedKeys(types, _patterns(paragraph))


def undocumented(connection: redis.Redis) -> list[str]:
    """What is wrong with the keys that Redis holds now, a line each."""
    documented, found = documented_keys(), []
    for raw in connection.scan_iter(count=1000):
        key, kind = raw.decode(), connection.type(raw).decode()
        expiry_s = connection.ttl(raw)
        wanted = documented.type_of(key)
        if kind == "none":
            continue
        if wanted is None:
            found.append(f"{key} ({kind}) is not documented")
        elif wanted != kind:
            found.append(f"{key} is a {kind}, documented as {wanted}")
        elif expiry_s == -1 and not documented.may_last(key):
            found.append(f"{key} ({kind}) has no expiry")
    return sorted(found)


_TYPES = {
    "hash": "hash",
    "list": "list",
    "set": "set",
    "sorted set": "zset",
    "stream": "stream",
    "string": "string",
}


def _patterns(text: str) -> list[re.Pattern[str]]:
    """Of names in backticks; `:part` stands for the name before it with another last part."""
    names: list[str] = []
    for name in _CODE.findall(text):
        names.append(names[-1].rpartition(":")[0] + name if name.startswith(":") else name)
    return [re.compile(_regex(name)) for name in names]


def _regex(name: str) -> str:
    parts, place = [], 0
    for found in _PLACE.finditer(name):
        parts.append(re.escape(name[place : found.start()]))
        parts.append(r"\{[^}]+\}" if found[0] == "{model}" else ".+")
        place = found.end()
    return "".join([*parts, re.escape(name[place:])])
