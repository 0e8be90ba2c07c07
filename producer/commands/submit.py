"""`trtq submit` and `trtq result`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from producer.commands.shared import (
    Model,
    Priority,
    RedisUrl,
    open_client,
    warn_if_unserved,
)

Output = Annotated[Path | None, typer.Option(help="Write the result to this .npy or .npz instead.")]


def submit(
    model: Model,
    inputs: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]", help="A .npy, .npz or JSON file; - is stdin.", show_default="-"
        ),
    ] = "-",
    output: Output = None,
    priority: Priority = "normal",
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which the answer is useless.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for room in a full queue.")
    ] = None,
    store: Annotated[
        bool, typer.Option("--store", help="Keep the result for `trtq result`; prints its id.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(help="Idempotency key: the same key and inputs again are not run again."),
    ] = None,
    key_window: Annotated[
        float | None, typer.Option(help="Seconds for which the key is remembered.")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Run one task and print its result as JSON.

    A .npz or a JSON object gives inputs by name; a .npy or a JSON list is the only input.
    """
    from producer.commands.arrays import check_output, read_inputs

    if output is not None:
        check_output(output)
    value = read_inputs(inputs, sys.stdin.buffer)
    with open_client(redis_url) as client:
        outputs = client.spec(model).outputs
        if output is not None and output.suffix == ".npy":
            _check_single_output(len(outputs), output)
        warn_if_unserved(redis_url, model)
        ticket = client.submit(
            model,
            value,
            priority=priority,
            deadline=deadline,
            timeout=timeout,
            store=store,
            key=key,
            key_window_s=key_window,
        )
        if store:
            typer.echo(f"task {ticket.task_id}", err=True)
        result = ticket.result()
    if output is None:
        _print(result)
    else:
        named = result if isinstance(result, dict) else {outputs[0].name: result}
        _write(output, named)


def result(
    task_id: Annotated[str, typer.Argument(metavar="TASK", help="The id that --store printed.")],
    output: Output = None,
    redis_url: RedisUrl = None,
) -> None:
    """Print the stored result of a task that was submitted with --store."""
    from producer.commands.arrays import check_output

    if output is not None:
        check_output(output)
    with open_client(redis_url) as client:
        value = client.result(task_id, by_name=output is not None)
    if output is None:
        _print(value)
    else:
        _write(output, value)


def _check_single_output(number: int, output: Path) -> None:
    from producer.errors import InvalidInput

    if number > 1:
        raise InvalidInput(f"--output {str(output)!r}: the model has {number} outputs, use a .npz")


def _print(value: Any) -> None:
    from producer.commands.arrays import to_json

    typer.echo(to_json(value))


def _write(output: Path, named: dict[str, Any]) -> None:
    from producer.commands.arrays import write_outputs

    write_outputs(output, named)
    arrays = ", ".join(
        f"{name} {array.dtype} {array.shape}" for name, array in sorted(named.items())
    )
    typer.echo(f"wrote {output}: {arrays}")
