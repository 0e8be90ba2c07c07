"""The arithmetic of docs/scaling.md follows from its measured columns."""

from __future__ import annotations

import re

import pytest

from tests.support.processes import ROOT

TEXT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
SHARE = 0.7


def table(heading: str) -> list[dict[str, str]]:
    """Rows of the table whose first line begins with `heading`."""
    lines = iter(TEXT.splitlines())
    names = next(cells(line) for line in lines if line.startswith(heading))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(names, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    """Texts between the bars."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(text: str) -> float:
    """The first number in a cell."""
    return float(re.findall(r"[\d,.]*\d", text)[0].replace(",", ""))


COSTS = {row["payload, bytes"]: row for row in table("| payload, bytes | us a task, 64")}


@pytest.mark.parametrize("row", table("| payload, bytes | us a task |"), ids=str)
def test_tasks_and_bytes_follow_from_the_cost(row: dict[str, str]) -> None:
    cost = COSTS[row["payload, bytes"]]
    assert row["us a task"] == cost["us a task, 64 a call"]
    per_s = SHARE * 1e6 / number(cost["us a task, 64 a call"])
    assert number(row["tasks/s"]) == pytest.approx(per_s, rel=0.01)
    assert number(row["MB/s in"]) == pytest.approx(per_s * number(cost["bytes in"]) / 1e6, rel=0.05)
    log = per_s * number(cost["log bytes"]) / 1e6
    assert number(row["MB/s log"]) == pytest.approx(log, rel=0.05)


@pytest.mark.parametrize("row", table("| payload, bytes | 100 rows/s"), ids=str)
def test_gpus_follow_from_the_cost(row: dict[str, str]) -> None:
    kind = row.pop("payload, bytes")
    name = kind.removesuffix(", 1 a call")
    rows = 128 if "reference" in name else 1
    column = "us a task, 64 a call" if rows == 1 else "us a task, 1 a call"
    per_s = SHARE * 1e6 / number(COSTS[name][column]) * rows
    for speed, gpus in row.items():
        assert number(gpus) == pytest.approx(per_s / number(speed), rel=0.05, abs=0.006), speed


def test_worked_examples_stay_below_the_share() -> None:
    first, *examples = table("| | ResNet-50")[0]
    rows = {row[first].strip("*"): row for row in table("| | ResNet-50")}
    for example in examples:
        share = number(rows["Redis' thread for one GPU"][example].rpartition("=")[2]) / 100
        together = number(rows["GPUs on one Redis"][example])
        assert together == int(SHARE / share)
        for gpus in (1, 8, 64, 1000):
            servers = number(rows[f"{gpus:,} GPU{'s' if gpus > 1 else ''}"][example])
            assert servers == -(-gpus // int(together)), (example, gpus)
