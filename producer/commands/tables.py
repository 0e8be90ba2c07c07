"""Models, queues and workers as rich tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from producer.keys import PRIORITIES
from producer.letters import DeadLetter
from producer.quote import one_line, printable, shown_name
from producer.spec import ModelSpec, TensorSpec
from producer.status import Status

LETTER_COLUMNS = ("rows", "deliveries", "size", "age")


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


def letters_table(letters: Sequence[tuple[str, DeadLetter]]) -> RenderableType:
    """Dead letters by model."""
    table = _table("id", "model", "task", "reason", "priority", right=LETTER_COLUMNS)
    now_ms = time.time() * 1000
    for model, letter in letters:
        table.add_row(
            letter.letter_id,
            model,
            _plain(shown_name(letter.task_id) if letter.task_id else "?"),
            _plain(one_line(letter.code, 40)),
            PRIORITIES[letter.priority],
            str(letter.rows),
            str(letter.deliveries),
            size(letter.frame_bytes),
            seconds(max(0, int(now_ms - letter.died_ms))),
        )
    return table if letters else "no dead letters"


def letter_table(document: dict[str, Any]) -> RenderableType:
    """One dead letter, a line for each fact."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def add(name: str, text: str) -> None:
        table.add_row(name, _plain(one_line(text, 2000)))

    add("id", document["id"])
    add("model", document["model"])
    add("task", shown_name(document["task_id"]) if document["task_id"] else "?")
    add("reason", document["code"])
    add("message", document["message"])
    add("submitted", _moment(document["queued_ms"]))
    add("given up", _moment(document["died_ms"]))
    add("priority", document["priority"])
    add("rows", str(document["rows"]))
    add("deliveries", str(document["deliveries"]))
    add("workers", ", ".join(map(shown_name, document["workers"])) or "unknown")
    add("message size", size(document["frame_bytes"]) + ("" if document["kept"] else ", not kept"))
    for tensor in document.get("inputs", ()):
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        add("input", f"{shown_name(tensor['name'])}: {tensor['dtype']} {shape}")
    if reference := document.get("reference"):
        add("file rows", f"{reference['start']} to {reference['stop']}")
        for kind in ("inputs", "outputs"):
            for name, path in reference[kind].items():
                add(kind[:-1], f"{shown_name(name)}: {path}")
    if "unreadable" in document:
        add("task is unreadable", document["unreadable"])
    return table


def _moment(ms: int) -> str:
    if not ms:
        return "?"
    return datetime.fromtimestamp(ms / 1000, tz=timezone.utc).isoformat(" ", "milliseconds")


def _plain(text: str) -> Text:
    # What came from the wire is no markup.
    return Text(text)


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
