"""`trtq bulk`: a whole file through a model, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from producer.commands.common import (
    DEFAULT_URL,
    EXIT_INTERRUPTED,
    EXIT_ROWS_FAILED,
    RedisUrl,
    console,
    reported,
)

if TYPE_CHECKING:
    from producer.bulk import BulkProgress, BulkSummary


@reported
def bulk(
    model: Annotated[str, typer.Argument(help="Name of a published model.")],
    input_path: Annotated[
        Path, typer.Argument(metavar="INPUT", help=".npy, .parquet, .arrow, or a folder of .npy.")
    ],
    output_path: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help=".npy, or a folder for several outputs.")
    ],
    window: Annotated[int, typer.Option(min=1, help="Tasks under way at once.")] = 32,
    rows_per_task: Annotated[
        int | None, typer.Option(min=1, help="Rows per task; default: the model's max_batch.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted job.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output.")
    ] = False,
    redis_url: RedisUrl = DEFAULT_URL,
) -> None:
    """Runs every row of INPUT through MODEL into OUTPUT.

    The workers read and write the files themselves, inside their --bulk-root folders. Exit code
    3: some rows failed; they are NaN (0 in integers) in OUTPUT and listed in OUTPUT.errors.jsonl.
    """
    from producer.bulk import run_bulk
    from producer.client import Client

    try:
        with Client(redis_url) as client, _bar() as progress:
            summary = run_bulk(
                client,
                model,
                input_path,
                output_path,
                window=window,
                rows_per_task=rows_per_task,
                resume=resume,
                overwrite=overwrite,
                progress=progress,
            )
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command with --resume goes on from here", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _print(summary)
    if summary.failed:
        typer.echo(f"{summary.failed} rows failed: see {summary.errors_path}", err=True)
        raise typer.Exit(EXIT_ROWS_FAILED)


def _print(summary: BulkSummary) -> None:
    resumed = f" ({summary.resumed_rows} done before)" if summary.resumed_rows else ""
    typer.echo(
        f"{summary.rows} rows{resumed} in {summary.tasks} tasks, {summary.seconds:.2f} s, "
        f"{summary.rows_per_s:.0f} rows/s, {summary.failed} failed"
    )
    for path in summary.output_paths:
        typer.echo(str(path))


@contextmanager
def _bar() -> Iterator[Callable[[BulkProgress], None]]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} rows/s"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=None, rate=0.0, failed=0)

        def show(now: BulkProgress) -> None:
            ended = now.rows_done - now.resumed_rows
            bar.update(
                task,
                completed=now.rows_done,
                total=now.rows_total,
                rate=ended / now.elapsed_s if now.elapsed_s > 0 else 0.0,
                failed=now.failed,
            )

        yield show
