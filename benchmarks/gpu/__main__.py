"""`python -m benchmarks.gpu --json FILE`: everything, tables last; `--only` names some parts."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu import end_to_end, loops, rates, several, soak
from benchmarks.gpu.job import BATCH, make_job
from benchmarks.gpu.subject import SUBJECTS
from benchmarks.report import Target, machine, print_targets, write_json
from workers.devices import parse_devices
from workers.tensorrt.device import current_device
from workers.tensorrt.flavor import find_flavor

PARTS = ("resnet50", "small", "soak", "loads", "end-to-end", "shared", "several-gpus")
_SYSTEM = {"end-to-end", "shared", "several-gpus"}
_BATCHES = (1, 8, 32, 64, 128, 256)
_COPIES = (1, 2, 4)


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write it all.")] = None,
    only: Annotated[str, typer.Option(help=f"Parts, of {', '.join(PARTS)}.")] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(help="Seconds of one measurement.")] = 0.5,
    images: Annotated[int, typer.Option(help="Rows of the bulk job.")] = 50_000,
    clients: Annotated[int, typer.Option(help="Client processes of the submits.")] = 8,
    slots: Annotated[int, typer.Option(min=1, max=16, help="Slots of the end-to-end model.")] = 6,
    folder: Annotated[Path | None, typer.Option(help="For models, plans and data.")] = None,
) -> None:
    """Measure the TensorRT executor on this machine's first GPU, and bulk jobs on all of them."""
    parts = only.split(",")
    if unknown := set(parts) - set(PARTS):
        raise typer.BadParameter(f"no part is named {', '.join(sorted(unknown))}")
    gpus = len(parse_devices("all"))
    if parts == ["several-gpus"] and gpus < 2:
        raise typer.BadParameter(f"several-gpus: this machine has {gpus} GPU")
    console, flavor, device = Console(width=170), find_flavor(), current_device()
    found: dict[str, Any] = {
        "gpu": device.name,
        "gpus": gpus,
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
                found[name] = rates.measure(subjects[name], seconds, console)
                tables.append(rates.table(name, found[name]))
        if "resnet50" in parts:
            wanted += rates.targets(found["resnet50"])
        if "soak" in parts:
            first, last = soak.many_batches(subjects["small"], 20_000, 1_000)
            found["soak"] = {"after_1000": first._asdict(), "after_20000": last._asdict()}
            tables.append(_usage_table("20,000 batches of changing sizes", first, last))
        if "loads" in parts:
            first, last = soak.many_loads(subjects["resnet50"], 50)
            found["loads"] = {"after_5": first._asdict(), "after_50": last._asdict()}
            tables.append(_usage_table("50 loads and unloads", first, last))
        if _SYSTEM & set(parts):
            job = make_job(subjects["resnet50"], at, images)
        if "end-to-end" in parts:
            with loops.bare_context(subjects["resnet50"], BATCH, graphs=True) as bare:
                bare_rate = loops.back_to_back(bare, BATCH, 2 * seconds)
            result = end_to_end.end_to_end(job, clients, 6 * seconds, slots)
            result["bare_at_128"] = bare_rate
            found["end_to_end"] = result
            wanted.append(Target("bulk_over_bare", result["bulk"]["per_s"] / bare_rate, least=0.90))
            console.print(result)
        if "shared" in parts:
            found["shared"] = several.on_one_gpu(job, slots, _COPIES, clients, 6 * seconds, console)
            tables.append(several.table(found["shared"]))
        if "several-gpus" in parts:
            found["several_gpus"] = several.on_all_gpus(job, slots, gpus) if gpus > 1 else []
            wanted.append(several.target(found["several_gpus"], max(gpus, 2)))
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
