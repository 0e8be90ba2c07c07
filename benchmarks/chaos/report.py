"""The table of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.chaos.judge import MUST_BE_ZERO, failed

_COUNTS = ("accepted", "answered_once", *MUST_BE_ZERO)


def broken(name: str, reason: str) -> dict[str, Any]:
    """The row of a fault that could not be judged."""
    return {"fault": name, **dict.fromkeys(_COUNTS, 0), "named_errors": {}, "failures": [reason]}


def print_rows(console: Console, rows: Sequence[dict[str, Any]], seconds: float) -> None:
    """One line for each fault, and what was broken."""
    table = Table(title=f"Faults under load ({seconds:.0f} s in all)")
    table.add_column("fault")
    for name in ("accepted", "once", "twice", "lost", "wrong", "hung", "load s", "per s", "max ms"):
        table.add_column(name, justify="right")
    table.add_column("named errors")
    table.add_column("ok")
    for row in rows:
        named = ", ".join(f"{code} {count}" for code, count in row["named_errors"].items())
        table.add_row(
            row["fault"],
            *(str(row[key]) for key in _COUNTS),
            f"{row.get('load_s', 0):.0f}",
            f"{row.get('per_s', 0):.0f}",
            f"{row.get('max_ms', 0):.0f}",
            named or "-",
            "[red]no" if failed(row) else "[green]yes",
        )
    for row in rows:
        for text in row["failures"]:
            console.print(f"[red]{row['fault']}: {text}", markup=True, highlight=False)
    console.print(table)
