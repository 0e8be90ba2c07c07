"""No deadline, lease or order rests on a machine's wall clock, which may be stepped."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import ROOT

_WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
#: What operators are shown: a worker's start, the time of a dead letter.
_SHOWN_ONLY = {"producer/commands/tables.py": 1, "workers/runtime.py": 1, "workers/tracing.py": 1}


def uses(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            if ".".join(parts[-2:]) in _WALL:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (name.name for name in node.names if name.name in ("time", "time_ns"))


def test_only_what_is_shown_reads_the_wall_clock() -> None:
    found = {
        str(file.relative_to(ROOT)): count
        for package in ("producer", "workers")
        for file in sorted((ROOT / package).rglob("*.py"))
        if (count := len(list(uses(file))))
    }
    assert found == _SHOWN_ONLY


def test_the_search_finds_uses(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("import time\nfrom time import time_ns\nprint(time.time(), datetime.now())\n")
    assert sorted(uses(file)) == ["datetime.now", "time.time", "time_ns"]
