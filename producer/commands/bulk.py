"""`trtq bulk`: a whole file through a model, with a progress bar."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from producer.commands.shared import (
    EXIT_INTERRUPTED,
    EXIT_ROWS_FAILED,
    AsJson,
    Model,
    Priority,
    RedisUrl,
    open_client,
    warn_if_unserved,
)

if TYPE_CHECKING:
    from producer.bulk import BulkProgress, BulkSummary


def bulk(
    model: Model,
    input_path: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A .npy of rows; a folder of <input>.npy; or a .parquet or .arrow file.",
        ),
    ],
    output_path: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="A .npy, or a folder if there are several outputs."),
    ],
    window: Annotated[int, typer.Option(min=1, help="Tasks under way at once.")] = 32,
    rows_per_task: Annotated[
        int | None, typer.Option(min=1, help="Rows of one task; the model's batch by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted job, failed rows again.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output that exists.")
    ] = False,
    priority: Priority = "low",
    deadline: Annotated[float, typer.Option(help="Seconds that one task may take.")] = 600.0,
    redis_patience: Annotated[
        float, typer.Option(min=0, help="Seconds without Redis after which the job stops.")
    ] = 30.0,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Run every row of a file through a model.

    The workers read and write the files themselves, so both must lie in a folder that they were
    started with as --bulk-root. A job that was interrupted or lost Redis goes on with --resume,
    unless the model has changed; one that is done is left as it is. Exit code 3: some rows failed,
    listed in OUTPUT.errors.jsonl.
    """
    from producer.bulk import run_bulk

    try:
        with open_client(redis_url) as client:
            client.spec(model)
            warn_if_unserved(redis_url, model)
            with _progress_bar(model) as progress:
                summary = run_bulk(
                    client,
                    model,
                    input_path,
                    output_path,
                    window=window,
                    rows_per_task=rows_per_task,
                    resume=resume,
                    overwrite=overwrite,
                    priority=priority,
                    deadline_s=deadline,
                    redis_patience_s=redis_patience,
                    progress=progress,
                )
    except KeyboardInterrupt:
        typer.echo(
            "interrupted; the same command with --resume (without --overwrite) goes on from here",
            err=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(summary, as_json)
    if summary.failed:
        raise typer.Exit(EXIT_ROWS_FAILED)


@contextmanager
def _progress_bar(model: str) -> Iterator[Callable[[BulkProgress], None]]:
    """A bar on stderr if that is a terminal; warnings are printed above it."""
    from rich.console import Console
    from rich.logging import RichHandler
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    handler = RichHandler(console=console, show_path=False, level=logging.WARNING)
    root = logging.getLogger()
    root.addHandler(handler)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows  {task.fields[rate]:,.0f}/s  failed {task.fields[failed]}  left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task_ids: list[TaskID] = []

    def update(progress: BulkProgress) -> None:
        ran = progress.rows_done - progress.resumed_rows
        rate = ran / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
        if not task_ids:
            # Rows of an earlier run are where the bar begins; they say nothing about speed.
            begin, total = progress.resumed_rows, progress.rows_total
            task_ids.append(bar.add_task(model, total=total, completed=begin, rate=0.0, failed=0))
        bar.update(task_ids[0], completed=progress.rows_done, rate=rate, failed=progress.failed)

    try:
        with bar:
            yield update
    finally:
        root.removeHandler(handler)


def _show(summary: BulkSummary, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary._asdict(), default=_text))
        return
    if not summary.tasks and not summary.failed:
        typer.echo(f"already done: all {summary.rows:,} rows were finished before, nothing was run")
        for path in summary.output_paths:
            typer.echo(f"output  {path}")
        return
    resumed = f" ({summary.resumed_rows:,} of them done before)" if summary.resumed_rows else ""
    typer.echo(
        f"{summary.rows:,} rows{resumed} in {summary.seconds:.1f} s: "
        f"{summary.rows_per_s:,.0f} rows/s, {summary.tasks:,} tasks, {summary.failed:,} rows failed"
    )
    for path in summary.output_paths:
        typer.echo(f"output  {path}")
    if summary.errors_path is not None:
        typer.echo(f"errors  {summary.errors_path}")


def _text(value: object) -> str:
    assert isinstance(value, Path)
    return str(value)
