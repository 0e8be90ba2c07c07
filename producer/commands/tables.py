"""Models, queues and workers as rich tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from producer.quote import printable
from producer.spec import ModelSpec, TensorSpec
from producer.status import Status


def models_table(specs: Sequence[ModelSpec]) -> RenderableType:
    """What each model takes and gives."""
    table = _table("model", "inputs", "outputs", right=("max batch", "max rows a task"))
    for spec in specs:
        table.add_row(
            _cell(spec.name),
            _tensors(spec.inputs),
            _tensors(spec.outputs),
            str(spec.max_batch),
            str(spec.max_rows_per_task),
        )
    return table if specs else "no models: is a worker running?"


def status_tables(status: Status) -> RenderableType:
    """Queues above workers."""
    columns = "high normal low running oldest rows bytes turns bells workers dead"
    queues = _table("model", right=columns.split())
    for name, queue in status.queues.items():
        queues.add_row(
            name,
            *(f"{depth:,}" for depth in (queue.high, queue.normal, queue.low, queue.claimed)),
            seconds(queue.oldest_age_ms),
            f"{queue.rows:,}",
            size(queue.bytes),
            *(str(count) for count in (queue.turns, queue.bells, queue.workers)),
            f"[red]{queue.dead}[/]" if queue.dead else "0",
        )
    workers = _table(
        "worker",
        "host",
        "device",
        "models",
        right=("pid", "tasks/s", "rows/s", "tasks", "mean batch", "failed", "expired"),
    )
    for report in status.workers:
        workers.add_row(*_worker(report))
    return Group(
        queues if status.queues else "no models: no worker has been here yet",
        workers if status.workers else "no workers",
        *(Text(f"left out: {printable(text)}", style="red") for text in status.unreadable),
    )


def _worker(report: dict[str, Any]) -> list[Text | str]:
    def number(name: str) -> float:
        return float(report.get(name, 0))

    batches = number("batches")
    return [
        _cell(report.get("node") or report["name"]),
        _cell(report.get("host", "?")),
        _cell(report.get("device", "?")),
        _cell(", ".join(report.get("models", []))),
        _cell(report.get("pid", "?")),
        *(f"{number(name):,.0f}" for name in ("tasks_per_s", "rows_per_s", "tasks")),
        f"{number('rows') / batches:.1f}" if batches else "-",
        *(f"{number(name):,.0f}" for name in ("failed", "expired")),
    ]


def _table(*left: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in left:
        table.add_column(title, overflow="fold")
    for title in right:
        table.add_column(title, justify="right")
    return table


def _cell(value: object) -> Text:
    """What others wrote: not read as markup, nothing in it that would steer the terminal."""
    return Text(printable(str(value)))


def _tensors(tensors: Sequence[TensorSpec]) -> Text:
    return _cell(
        "\n".join(
            f"{tensor.name}: {tensor.dtype} "
            + ("x".join("any" if n is None else str(n) for n in tensor.shape) or "scalar")
            for tensor in tensors
        )
    )


def seconds(milliseconds: int) -> str:
    """An age for people."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    if milliseconds < 120_000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds / 60_000:.1f} min"


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
