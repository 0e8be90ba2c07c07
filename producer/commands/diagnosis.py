"""What the doctor found, as rich tables and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from producer.doctor.measures import Measured
from producer.doctor.rules import Finding

_BAR_WIDTH = 48
_MEANING = {
    "queue_wait": "in Redis, until a worker claims the task",
    "hold": "in the worker, until a slot takes the batch",
    "gather": "rows into the slot's buffers",
    "preprocess": "the model's hook",
    "h2d": "copy to the device",
    "execute": "the model on the device",
    "d2h": "copy from the device",
    "postprocess": "the model's hook",
    "run": "the model, and what is not told apart",
    "scatter": "outputs into replies",
    "reply": "replies to Redis",
}


class Diagnosis(NamedTuple):
    """One model: its numbers and what the rules found, most important first."""

    model: str
    measured: Measured
    findings: list[Finding]

    def as_document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "bottleneck": self.findings[0].rule if self.findings else None,
            "findings": [finding._asdict() for finding in self.findings],
            "stages_ms": self.measured.stages_ms,
            "measures": self.measured.measures.as_document(),
        }


def diagnosis_view(diagnoses: Sequence[Diagnosis], seconds: float) -> RenderableType:
    """All models, one after another."""
    if not diagnoses:
        return "no models: is a worker running?"
    return Group(*(_model(one, seconds) for one in diagnoses))


def _model(one: Diagnosis, seconds: float) -> RenderableType:
    measures = one.measured.measures
    name = escape(one.model)
    if measures.slots is None and measures.workers:
        words = "its workers' metrics were not read: start them with --metrics-port"
        return Group(f"[bold]{name}[/]: {words}", *_words(one.findings), "")
    if not measures.tasks_per_s and not one.findings:
        return f"[bold]{name}[/]: nothing ran within {seconds:.1f} s and nothing waits\n"
    facts = [
        f"{measures.tasks_per_s:,.0f} tasks/s",
        f"{measures.rows_per_s:,.0f} rows/s",
        *_fact("{:.1f} rows a batch", measures.mean_batch_rows),
        *_fact("{:.0%} of slots' time busy", measures.slots_busy_share),
        *_fact("{:,.1f} tasks in flight", measures.in_flight_tasks),
        f"{measures.waiting_tasks:,.0f} tasks waiting",
    ]
    head = f"[bold]{name}[/]: {', '.join(facts)}, over {seconds:.1f} s"
    return Group(head, *_chart(one.measured), *_words(one.findings), "")


def _fact(text: str, value: float | None) -> list[str]:
    return [] if value is None else [text.format(value)]


def _chart(measured: Measured) -> list[RenderableType]:
    total = sum(measured.stages_ms.values())
    if not total:
        return []
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("stage")
    table.add_column("mean", justify="right")
    table.add_column("share", justify="right")
    table.add_column("a request's way", width=_BAR_WIDTH)
    table.add_column("")
    begin = 0.0
    for stage, took_ms in measured.stages_ms.items():
        # A line of the width of nothing is no bar: even the shortest stage shows.
        end = max(begin + took_ms, begin + total / _BAR_WIDTH / 8)
        table.add_row(
            stage,
            f"{took_ms:.3f} ms",
            f"{took_ms / total:.0%}",
            Bar(total, begin, min(total, end), width=_BAR_WIDTH, color="cyan"),
            f"[dim]{_MEANING[stage]}[/]",
        )
        begin += took_ms
    return [table]


def _words(findings: Sequence[Finding]) -> list[RenderableType]:
    if not findings:
        return ["[green]healthy[/]: no finding"]
    lines: list[RenderableType] = []
    for place, finding in enumerate(findings):
        title = "bottleneck" if place == 0 else "also"
        lines.append(f"[bold red]{title}[/] \\[{finding.rule}]: {escape(finding.says)}")
        lines.append(f"  next: {escape(finding.advice)}")
    return lines
