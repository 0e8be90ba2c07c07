"""`trtq build` and `trtq inspect`: TensorRT plans."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from producer.commands.shared import AsJson, stdout

_COMMANDS = "workers.plans"


def build(
    model: Annotated[Path, typer.Argument(help="A model's .yaml file, or an .onnx file.")],
    output: Annotated[
        Path | None, typer.Option(help="Also write the plan here.", show_default="cache only")
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most rows in a batch, for an .onnx file.")
    ] = 64,
    as_json: AsJson = False,
) -> None:
    """Build a TensorRT plan from ONNX and keep it in the cache, as a worker would."""
    made = importlib.import_module(_COMMANDS).build(model, max_batch, output)
    if as_json:
        typer.echo(json.dumps(made))
        return
    state = "found" if made["from_cache"] else "built"
    typer.echo(f"{state} {made['plan']} ({made['size_bytes']:,} bytes, GPU {made['gpu']})")


def inspect(
    engine: Annotated[Path, typer.Argument(help="A plan: .engine or .plan.")],
    as_json: AsJson = False,
) -> None:
    """Show a plan's bindings, profiles, layers and device memory, on the GPU that it is for."""
    facts = importlib.import_module(_COMMANDS).inspect(engine)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    _show(facts)


def _show(facts: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("binding", "kind", "dtype", "shape", "profiles (min, opt, max)")
    for binding in facts["bindings"]:
        bounds = [
            profile[binding["name"]] for profile in facts["profiles"] if binding["name"] in profile
        ]
        cells = (binding["name"], binding["kind"], binding["dtype"], binding["shape"])
        text = "\n".join(" ".join(map(str, shapes)) for shapes in bounds)
        table.add_row(*(escape(str(cell)) for cell in (*cells, text)))
    console = stdout()
    console.print(
        f"{facts['flavor']} {facts['version']}, {facts['size_bytes']:,} bytes, "
        f"device memory {facts['device_memory_bytes']:,} bytes, {len(facts['layers'])} layers"
    )
    console.print(table)
    for layer in facts["layers"]:
        console.print(escape(layer))
