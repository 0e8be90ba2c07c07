"""From what clients and workers saw to one row of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

#: A row with one of these above 0 fails the run.
MUST_BE_ZERO = ("answered_twice", "lost", "wrong", "hung")


def judge(
    fault: str,
    clients: Sequence[dict[str, Any]],
    seconds: float,
    *,
    allowed: Collection[str] = (),
    poison: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A row. `allowed`: codes of errors that good tasks may end with under this fault.

    A good task that ended with any other error counts as lost, whoever gave it that error;
    a poison task must end with the code `poison`.
    """
    named: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    poisons: Counter[str] = Counter()
    for one in clients:
        named.update(one["named"])
        named.update(one["unanswered"])
        refused.update(one["refused"])
        poisons.update(one["poisons"])
    accepted = sum(one["accepted"] for one in clients)
    other_poison = sum(n for code, n in poisons.items() if code not in (poison, "answered"))
    return {
        "fault": fault,
        "accepted": accepted,
        "answered_once": sum(one["once"] for one in clients),
        "answered_twice": sum(one["twice"] for one in clients),
        "lost": sum(n for code, n in named.items() if code not in allowed) + other_poison,
        "wrong": sum(one["wrong"] for one in clients),
        "hung": sum(one["hung"] for one in clients),
        "named_errors": dict(named + Counter(f"poison: {c}" for c in poisons.elements())),
        "refused": dict(refused),
        "per_s": round(accepted / seconds, 1),
        "p50_ms": max(one["p50_ms"] for one in clients),
        "max_ms": max(one["max_ms"] for one in clients),
        "latest_end_after_deadline_s": max(one["late_s"] for one in clients),
        "failures": [],
        **more,
    }


def failed(row: dict[str, Any]) -> bool:
    """True if the row breaks a promise."""
    return bool(row["failures"]) or any(row[key] for key in MUST_BE_ZERO)


def check(row: dict[str, Any], good: bool, text: str) -> None:
    """Notes a failure of the fault's own expectation."""
    if not good:
        row["failures"].append(text)
