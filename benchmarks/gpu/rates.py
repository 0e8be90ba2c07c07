"""Rows/s of one model by batch size: the loops, the executor by slots, and how they compare."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu import executor, loops
from benchmarks.gpu.subject import Subject
from benchmarks.report import Target

SLOTS = (1, 2, 3, 4)
#: What small batches gain from beyond that, with graphs.
MORE_SLOTS = (6, 8)
_SMALL_BATCH = 8


def measure(subject: Subject, seconds: float, console: Console) -> dict[str, Any]:
    """All loops and the executor for every batch size, and the errors against torch."""
    sizes = (1, 3, *subject.batches, 7)
    norm, largest = loops.worst_errors(subject, sizes, graphs=True)
    found: dict[str, Any] = {"error_2_norm": norm, "error_max": largest, "batches": {}}
    for batch in subject.batches:
        rates: dict[str, float] = {}
        with loops.bare_context(subject, batch, graphs=False) as bare:
            first = loops.back_to_back(bare, batch, seconds)
            rates["serial"] = loops.serial(bare, batch, seconds)
            rates["sync"] = loops.synchronous(subject, bare, batch, seconds)
        with loops.bare_context(subject, batch, graphs=True) as bare:
            rates["bare_graphs"] = loops.back_to_back(bare, batch, seconds)
        for slots, graphs in _variants(batch):
            rates[_name(slots, graphs)] = executor.executor_rate(
                subject, batch, slots, graphs=graphs, seconds=seconds
            )
        with loops.bare_context(subject, batch, graphs=False) as bare:
            # Before and after: clocks drift with the heat.
            rates["bare"] = (first + loops.back_to_back(bare, batch, seconds)) / 2
            rates["serial"] = (rates["serial"] + loops.serial(bare, batch, seconds)) / 2
        found["batches"][batch] = rates
        console.print(
            f"{subject.name} {batch}: " + " ".join(f"{k}={v:.0f}" for k, v in rates.items())
        )
    return found


def _variants(batch: int) -> list[tuple[int, bool]]:
    more = MORE_SLOTS if batch <= _SMALL_BATCH else ()
    return [(s, False) for s in SLOTS] + [(s, True) for s in (*SLOTS, *more)]


def _name(slots: int, graphs: bool) -> str:
    return f"slots_{slots}" + ("_graphs" if graphs else "")


def best(rates: dict[str, float]) -> float:
    """The executor at its best slot count."""
    return max(rate for name, rate in rates.items() if name.startswith("slots_"))


def table(name: str, found: dict[str, Any]) -> Table:
    """Rows/s, one line a batch size."""
    made = Table(
        "batch", "bare", "graphs", "serial", "sync", *(f"{s} slots" for s in SLOTS),
        *(f"{s}+graphs" for s in (*SLOTS, *MORE_SLOTS)), "best/bare", "best/sync", "best/serial",
        title=f"{name}: rows/s, error {found['error_2_norm']:.1e} (max {found['error_max']:.1e})",
    )  # fmt: skip
    for batch, r in found["batches"].items():
        names = [_name(s, False) for s in SLOTS] + [_name(s, True) for s in (*SLOTS, *MORE_SLOTS)]
        bare, top = max(r["bare"], r["bare_graphs"]), best(r)
        made.add_row(
            str(batch),
            *(f"{r[key]:,.0f}" for key in ("bare", "bare_graphs", "serial", "sync")),
            *(f"{r[key]:,.0f}" if key in r else "-" for key in names),
            *(f"{top / v:.3f}" for v in (bare, r["sync"], r["serial"])),
        )
    return made


def targets(found: dict[str, Any]) -> list[Target]:
    """What ResNet-50 should reach."""
    made = [Target("error_2_norm", found["error_2_norm"], most=5e-3)]
    for batch, r in found["batches"].items():
        top, bare = best(r), max(r["bare"], r["bare_graphs"])
        if batch >= 32:
            made.append(Target(f"over_bare_{batch}", top / bare, least=0.97))
        if batch >= 64:
            made.append(Target(f"over_sync_{batch}", top / r["sync"], least=1.25))
        if batch == 1:
            made.append(Target("over_serial_1", top / r["serial"], least=2.5))
    return made
