"""`trtq submit` and `trtq models`: one task, and what can be asked."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producer.commands.common import DEFAULT_URL, RedisUrl, console, reported
from producer.errors import InvalidInput

if TYPE_CHECKING:
    from producer.spec import TensorSpec

_STDIN = Path("-")


@reported
def submit(
    model: Annotated[str, typer.Argument(help="Name of a published model.")],
    file: Annotated[
        Path, typer.Argument(help=".npy, .npz (by input name), .json, or - for JSON from stdin.")
    ] = _STDIN,
    priority: Annotated[str, typer.Option(help="high, normal or low.")] = "normal",
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which the answer is useless.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait for room in a full queue.")
    ] = None,
    store: Annotated[
        bool, typer.Option("--store", help="Keep the result; its task id goes to stderr.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write .npy or .npz here instead of JSON to stdout.")
    ] = None,
    redis_url: RedisUrl = DEFAULT_URL,
) -> None:
    """Submits one task and prints its result."""
    from producer.client import Client

    if output is not None and output.suffix not in (".npy", ".npz"):
        raise InvalidInput(f"output {str(output)!r}: name it .npy or .npz")
    inputs = _read(file)
    with Client(redis_url) as client:
        ticket = client.submit(
            model, inputs, priority=priority, timeout=timeout, deadline=deadline, store=store
        )
        result = ticket.result()
    if store:
        typer.echo(f"task {ticket.task_id}", err=True)
    if output is None:
        typer.echo(json.dumps(_plain(result)))
    else:
        _write(output, result)


@reported
def models(redis_url: RedisUrl = DEFAULT_URL) -> None:
    """Lists the models that workers have published."""
    from rich.table import Table

    from producer.client import Client

    with Client(redis_url) as client:
        specs = client.models()
    table = Table("model", "inputs", "outputs", "max batch", "max rows per task")
    for spec in specs:
        table.add_row(
            spec.name,
            _tensors(spec.inputs),
            _tensors(spec.outputs),
            str(spec.max_batch),
            str(spec.max_rows_per_task),
        )
    # Without markup: a shape's brackets are no style.
    console().print(table if specs else "no models are published: is a worker running?")


def _tensors(tensors: tuple[TensorSpec, ...]) -> Any:
    from rich.text import Text

    lines = []
    for tensor in tensors:
        sizes = ["N", *("?" if size is None else str(size) for size in tensor.shape)]
        lines.append(f"{tensor.name}: {tensor.dtype} [{', '.join(sizes)}]")
    return Text("\n".join(lines))


def _read(file: Path) -> Any:
    import numpy as np

    try:
        if file == _STDIN:
            return json.load(sys.stdin)
        if file.suffix == ".json":
            return json.loads(file.read_text(encoding="utf-8"))
        if file.suffix == ".npy":
            return np.load(file, allow_pickle=False)
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
    except OSError as failure:
        raise InvalidInput(f"{str(file)!r} cannot be read: {failure}") from failure
    except (ValueError, EOFError, zipfile.BadZipFile) as failure:
        kind = "JSON" if file == _STDIN else file.suffix
        raise InvalidInput(f"{str(file)!r} is no valid {kind}: {failure}") from failure
    raise InvalidInput(f"{str(file)!r}: give a .npy, .npz or .json file, or - for JSON from stdin")


def _plain(result: Any) -> Any:
    if isinstance(result, dict):
        return {name: array.tolist() for name, array in result.items()}
    return result.tolist()


def _write(output: Path, result: Any) -> None:
    import numpy as np

    try:
        if output.suffix == ".npz":
            np.savez(output, **(result if isinstance(result, dict) else {"result": result}))
        elif isinstance(result, dict):
            raise InvalidInput(
                f"the model has outputs {', '.join(result)}: write them to a .npz, "
                f"not to {str(output)!r}"
            )
        else:
            np.save(output, result)
    except OSError as failure:
        raise InvalidInput(f"{str(output)!r} cannot be written: {failure}") from failure
