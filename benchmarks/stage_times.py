"""Where a worker's time goes, read from its metrics page before and after."""

from __future__ import annotations

import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_FAMILIES = ("trtq_stage_duration_seconds", "trtq_queue_wait_seconds")
_TIMEOUT_S = 5.0


class StageTime(NamedTuple):
    """How often a stage ran, and its seconds in all."""

    count: float
    total_s: float


class StageTimes:
    """The stages of all models of one worker, by name. `start` notes where they begin."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._before: dict[str, StageTime] = {}

    def start(self) -> None:
        """What comes after this is counted."""
        self._before = self._read()

    def mean_ms(self) -> dict[str, float]:
        """Mean milliseconds of one observation since `start`, of stages that had some."""
        found = {}
        for stage, now in self._read().items():
            before = self._before.get(stage, StageTime(0.0, 0.0))
            if now.count > before.count:
                count = now.count - before.count
                found[stage] = 1000 * (now.total_s - before.total_s) / count
        return found

    def _read(self) -> dict[str, StageTime]:
        with urllib.request.urlopen(self._url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
        values: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            if family.name not in _FAMILIES:
                continue
            for sample in family.samples:
                stage = sample.labels.get("stage", "queue_wait")
                kind = sample.name.rpartition("_")[2]
                if kind in ("sum", "count"):
                    values[stage, kind] = values.get((stage, kind), 0.0) + sample.value
        return {
            stage: StageTime(values[stage, "count"], values[stage, "sum"])
            for stage, kind in values
            if kind == "sum"
        }
