"""Percentiles, ratios, tables and the JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

_BUSY_PERCENT = 15.0


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks; `samples` need not be sorted."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class Spread(NamedTuple):
    """Median and extremes of the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Target(NamedTuple):
    """A ratio and what it should be: at least `least`, or at most `most`."""

    key: str
    value: float | None
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """None where it was not measured."""
        if self.value is None:
            return None
        if self.least is not None:
            return self.value >= self.least
        return self.most is None or self.value <= self.most

    @property
    def wanted(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    table = Table("ratio", "value", "target", "met", title="Targets")
    for target in targets:
        met = {True: "[green]yes", False: "[red]no", None: "not measured"}[target.met]
        value = "-" if target.value is None else f"{target.value:.3g}"
        table.add_row(target.key, value, target.wanted, met)
    console.print(table)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    packages = ("celery", "kombu", "redis", "hiredis", "msgpack", "numpy", "onnxruntime")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": [round(value, 2) for value in os.getloadavg()],
        "packages": {name: metadata.version(name) for name in packages},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def warn_if_busy(console: Console) -> None:
    """Says so if other processes use the machine: absolute numbers then mean little."""
    busy = psutil.cpu_percent(interval=1.0)
    if busy > _BUSY_PERCENT:
        console.print(
            f"[yellow]other processes use {busy:.0f}% of this machine: trust ratios, if anything"
        )


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(_rounded(document), indent=2) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
