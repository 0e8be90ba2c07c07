"""`python -m benchmarks.gpu --json FILE`: everything, tables last; `--only` names some parts."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import end_to_end, executor, loops, soak
from benchmarks.gpu.subject import SUBJECTS, Subject
from benchmarks.report import Target, machine, print_targets, write_json
from workers.tensorrt.device import current_device
from workers.tensorrt.flavor import find_flavor

PARTS = ("resnet50", "small", "soak", "loads", "end-to-end")
_BATCHES = (1, 8, 32, 64, 128, 256)
_SLOTS = (1, 2, 3, 4)


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
        for graphs in (False, True):
            for slots in _SLOTS:
                name = f"slots_{slots}" + ("_graphs" if graphs else "")
                rates[name] = executor.executor_rate(
                    subject, batch, slots, graphs=graphs, seconds=seconds
                )
        with loops.bare_context(subject, batch, graphs=False) as bare:
            # Before and after: clocks drift with the heat.
            rates["bare"] = (first + loops.back_to_back(bare, batch, seconds)) / 2
        found["batches"][batch] = rates
        console.print(
            f"{subject.name} {batch}: " + " ".join(f"{k}={v:.0f}" for k, v in rates.items())
        )
    return found


def best(rates: dict[str, float]) -> float:
    """The executor at its best slot count."""
    return max(rate for name, rate in rates.items() if name.startswith("slots_"))


def table(name: str, found: dict[str, Any]) -> Table:
    """Rows/s, one line a batch size."""
    made = Table(
        "batch", "bare", "graphs", "serial", "sync", *(f"{s} slots" for s in _SLOTS),
        *(f"{s}+graphs" for s in _SLOTS), "best/bare", "best/sync", "best/serial",
        title=f"{name}: rows/s, error {found['error_2_norm']:.1e} (max {found['error_max']:.1e})",
    )  # fmt: skip
    for batch, r in found["batches"].items():
        slots = [r[f"slots_{s}{end}"] for end in ("", "_graphs") for s in _SLOTS]
        bare, top = max(r["bare"], r["bare_graphs"]), best(r)
        made.add_row(
            str(batch),
            *(f"{v:,.0f}" for v in (r["bare"], r["bare_graphs"], r["serial"], r["sync"], *slots)),
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
            made.append(Target("over_bare_1", top / r["bare"], least=2.5))
    return made


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write it all.")] = None,
    only: Annotated[str, typer.Option(help=f"Parts, of {', '.join(PARTS)}.")] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(help="Seconds of one measurement.")] = 0.5,
    images: Annotated[int, typer.Option(help="Rows of the bulk job.")] = 50_000,
    clients: Annotated[int, typer.Option(help="Client processes of the submits.")] = 8,
    slots: Annotated[int, typer.Option(min=1, max=16, help="Slots of the end-to-end model.")] = 6,
    folder: Annotated[Path | None, typer.Option(help="For models, plans and data.")] = None,
) -> None:
    """Measure the TensorRT executor on this machine's first GPU."""
    parts = only.split(",")
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"no part is named {', '.join(sorted(unknown))}")
    console, flavor, device = Console(width=150), find_flavor(), current_device()
    found: dict[str, Any] = {
        "gpu": device.name,
        "flavor": f"{flavor.name} {flavor.version}",
        "machine": machine(),
        "seconds": seconds,
    }
    tables: list[Table] = []
    wanted: list[Target] = []
    with tempfile.TemporaryDirectory(prefix="trtq-gpu-") as made:
        at = folder or Path(made)
        at.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        subjects = {name: make(at, _BATCHES) for name, make in SUBJECTS.items()}
        for subject in subjects.values():
            subject.build()
        console.print(f"models built in {time.monotonic() - started_s:.1f} s")
        for name in SUBJECTS:
            if name in parts:
                found[name] = measure(subjects[name], seconds, console)
                tables.append(table(name, found[name]))
        if "resnet50" in parts:
            wanted += targets(found["resnet50"])
        if "soak" in parts:
            first, last = soak.many_batches(subjects["small"], 20_000, 1_000)
            found["soak"] = {"after_1000": first._asdict(), "after_20000": last._asdict()}
            tables.append(_usage_table("20,000 batches of changing sizes", first, last))
        if "loads" in parts:
            first, last = soak.many_loads(subjects["resnet50"], 50)
            found["loads"] = {"after_5": first._asdict(), "after_50": last._asdict()}
            tables.append(_usage_table("50 loads and unloads", first, last))
        if "end-to-end" in parts:
            with loops.bare_context(subjects["resnet50"], 128, graphs=True) as bare:
                bare_rate = loops.back_to_back(bare, 128, 2 * seconds)
            result = end_to_end.end_to_end(
                subjects["resnet50"], at, images, clients, 6 * seconds, slots
            )
            result["bare_at_128"] = bare_rate
            found["end_to_end"] = result
            wanted.append(Target("bulk_over_bare", result["bulk"]["per_s"] / bare_rate, least=0.90))
            console.print(result)
    if json_path is not None:
        found["targets"] = {t.key: {"value": t.value, "wanted": t.wanted} for t in wanted}
        write_json(json_path, found)
    console.print(f"{device.name}, {flavor.name} {flavor.version}")
    for each in tables:
        console.print(each)
    print_targets(console, wanted)


def _usage_table(title: str, first: soak.Usage, last: soak.Usage) -> Table:
    made = Table("", *soak.Usage._fields, title=title)
    made.add_row("early", *(f"{value:,}" for value in first))
    made.add_row("end", *(f"{value:,}" for value in last))
    return made


if __name__ == "__main__":
    typer.run(main)
