"""Two samples of the metrics as the numbers that rules judge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from producer.doctor.observation import Observation
from producer.doctor.pages import Page

_DEVICE = ("h2d", "execute", "d2h")
_HOOKS = ("preprocess", "postprocess")
#: The stages of a request in their order. `run` here is what its parts leave of it.
STAGES = (
    *("queue_wait", "hold", "gather", "preprocess", "h2d", "execute", "d2h"),
    *("postprocess", "run", "scatter", "reply"),
)
_STAGE = "trtq_stage_duration_seconds"
_WAIT = "trtq_queue_wait_seconds"


@dataclass(frozen=True)
class Measures:
    """One model over one sample. None: not measured here, so no rule judges by it.

    `_share` is a part of 1, `_ms` a mean in milliseconds, `_cores` processor seconds a second.
    """

    tasks_per_s: float
    rows_per_s: float
    batches: float
    #: Live workers of the model, and slots and most rows of a batch in each.
    workers: float
    slots: float | None = None
    max_batch_rows: float | None = None
    max_delay_ms: float | None = None
    #: Of tasks that were answered, those with an error.
    failed_share: float | None = None
    #: Tasks and rows that no worker held, mean of the looks.
    waiting_tasks: float = 0.0
    waiting_rows: float = 0.0
    #: Between acceptance and reply: rate x time (Little's law).
    in_flight_tasks: float | None = None
    in_flight_rows: float | None = None
    mean_batch_rows: float | None = None
    #: Mean batch as a share of the largest.
    batch_fill_share: float | None = None
    #: Standard deviation of batch rows over their mean, from the histogram's buckets.
    batch_variation: float | None = None
    #: Of computed rows, those that only fill batches up.
    padding_share: float | None = None
    #: Time in which at least one slot ran a batch; mean share of slots that did.
    busy_share: float | None = None
    slots_busy_share: float | None = None
    queue_wait_ms: float | None = None
    hold_ms: float | None = None
    gather_ms: float | None = None
    hooks_ms: float | None = None
    #: The model itself: `execute` on a device, else `run` without hooks.
    compute_ms: float | None = None
    #: gather + run + scatter: how long a batch occupies its slot.
    cycle_ms: float | None = None
    #: Of a cycle, copies to and from the device. None without a device.
    copy_share: float | None = None
    #: Batches that the device executed at once; its share of time with at least one, at most.
    execute_concurrency: float | None = None
    execute_busy_share: float | None = None
    #: Without a device: batches that computed at once, and what the worker process used.
    compute_concurrency: float | None = None
    cpu_cores: float | None = None
    pinned_bytes: float | None = None
    redis_cpu_cores: float | None = None
    redis_bytes_per_s: float | None = None
    redis_memory_share: float | None = None
    #: Processor time of the load's own process; None for others' load.
    client_cpu_cores: float | None = None

    def as_document(self) -> dict[str, float | None]:
        """For JSON and for texts, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Measured(NamedTuple):
    """Measures, and the mean of every stage that was observed, in ms, in the order of STAGES."""

    measures: Measures
    stages_ms: dict[str, float]


class _Sum(NamedTuple):
    """Observations of a histogram and their sum in seconds."""

    observed: float
    seconds: float

    @property
    def mean_ms(self) -> float | None:
        return self.seconds / self.observed * 1000 if self.observed else None


class _Model:
    """Growth of one model's counters over all workers."""

    def __init__(self, observation: Observation, model: str) -> None:
        self.model = model
        self.pairs: list[tuple[Page, Page]] = [
            (before, after)
            for before, after in zip(observation.before, observation.after, strict=True)
            if model in after.models
        ]
        self.worker_seconds = sum(max(0.0, b.at_s - a.at_s) for a, b in self.pairs)

    def grown(self, name: str, **labels: str) -> float:
        return sum(_grown(a, b, name, model=self.model, **labels) for a, b in self.pairs)

    def histogram(self, name: str, **labels: str) -> _Sum:
        return _Sum(self.grown(f"{name}_count", **labels), self.grown(f"{name}_sum", **labels))

    def gauge(self, name: str) -> float | None:
        """Mean over the workers."""
        found = [after.value(name, model=self.model) for _, after in self.pairs]
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else None

    def failed(self) -> float:
        name, total = "trtq_tasks_failed_total", 0.0
        for before, after in self.pairs:
            # What its own sender took back has not failed.
            for reason in set(after.labelled(name, "reason", model=self.model)) - {"cancelled"}:
                total += _grown(before, after, name, model=self.model, reason=reason)
        return total

    def batch_counts(self) -> list[tuple[float, float]]:
        """(upper bound, batches) of the histogram of batch rows."""
        counts: dict[float, float] = {}
        name = "trtq_batch_rows_bucket"
        for before, after in self.pairs:
            for bound in after.labelled(name, "le", model=self.model):
                found = _grown(before, after, name, model=self.model, le=bound)
                counts[float(bound)] = counts.get(float(bound), 0.0) + found
        ordered = sorted(counts.items())
        return [
            (bound, count - (ordered[place - 1][1] if place else 0.0))
            for place, (bound, count) in enumerate(ordered)
        ]


def models(observation: Observation) -> list[str]:
    """Every model that a page or a queue knows."""
    known = {model for page in observation.after for model in page.models}
    return sorted(known.union(*observation.queues))


def measure(observation: Observation, model: str) -> Measured:
    """The numbers of one model."""
    found = _Model(observation, model)
    stages = {name: found.histogram(_STAGE, stage=name) for name in STAGES}
    stages["queue_wait"] = found.histogram(_WAIT)
    seconds = observation.seconds
    tasks, rows = found.grown("trtq_tasks_answered_total"), found.grown("trtq_rows_total")
    batches = found.grown("trtq_batches_total")
    slots, max_batch = found.gauge("trtq_slots"), found.gauge("trtq_max_batch_rows")
    mean_batch = rows / batches if batches else None
    cycle = [stages["gather"], stages["run"], stages["scatter"]]
    cycle_ms = _total_ms(cycle)
    on_device = bool(stages["execute"].observed)
    compute_ms, compute_s = _compute(stages, on_device=on_device)
    path = [stages[name] for name in ("queue_wait", "hold", "gather", "run", "scatter", "reply")]
    in_flight = tasks / seconds * (_total_ms(path) or 0.0) / 1000 if tasks else None
    delay_s, pinned = found.gauge("trtq_max_delay_seconds"), found.gauge("trtq_pinned_bytes")
    padded_rows = found.grown("trtq_padded_rows_total")
    lived_s = found.worker_seconds
    waiting_tasks, waiting_rows, workers = _queue(observation, model)
    cores = sum(_grown(a, b, "process_cpu_seconds_total") for a, b in found.pairs)
    server = observation.server_after
    measures = Measures(
        tasks_per_s=tasks / seconds,
        rows_per_s=rows / seconds,
        batches=batches,
        workers=workers,
        slots=slots,
        max_batch_rows=max_batch,
        max_delay_ms=None if delay_s is None else delay_s * 1000,
        failed_share=found.failed() / tasks if tasks else None,
        waiting_tasks=waiting_tasks,
        waiting_rows=waiting_rows,
        in_flight_tasks=in_flight,
        in_flight_rows=in_flight * rows / tasks if in_flight is not None else None,
        mean_batch_rows=mean_batch,
        batch_fill_share=mean_batch / max_batch if mean_batch and max_batch else None,
        batch_variation=_variation(found.batch_counts()),
        padding_share=padded_rows / (rows + padded_rows) if rows else None,
        busy_share=_share(found.grown("trtq_busy_seconds_total"), lived_s),
        slots_busy_share=_share(sum(s.seconds for s in cycle), lived_s * (slots or 0)),
        queue_wait_ms=stages["queue_wait"].mean_ms,
        hold_ms=stages["hold"].mean_ms,
        gather_ms=stages["gather"].mean_ms,
        hooks_ms=_total_ms(stages[name] for name in _HOOKS),
        compute_ms=compute_ms,
        cycle_ms=cycle_ms,
        copy_share=_copy_share(stages, cycle_ms) if on_device else None,
        execute_concurrency=_ratio(stages["execute"].seconds, lived_s) if on_device else None,
        execute_busy_share=_share(stages["execute"].seconds, lived_s) if on_device else None,
        compute_concurrency=None if on_device else _ratio(compute_s, lived_s),
        cpu_cores=_ratio(cores, lived_s),
        pinned_bytes=(pinned or 0.0) if on_device else None,
        redis_cpu_cores=(server.cpu_s - observation.server_before.cpu_s) / seconds,
        redis_bytes_per_s=(server.net_bytes - observation.server_before.net_bytes) / seconds,
        redis_memory_share=(
            server.used_memory_bytes / server.max_memory_bytes if server.max_memory_bytes else None
        ),
        client_cpu_cores=(
            None if observation.client_cpu_s is None else observation.client_cpu_s / seconds
        ),
    )
    return Measured(measures, _stages_ms(stages))


def _stages_ms(stages: Mapping[str, _Sum]) -> dict[str, float]:
    shown = {name: stages[name].mean_ms for name in STAGES}
    run_ms = stages["run"].mean_ms
    if run_ms is not None:
        parts = sum(shown[name] or 0.0 for name in (*_HOOKS, *_DEVICE))
        shown["run"] = max(0.0, run_ms - parts)
    return {name: shown[name] or 0.0 for name in STAGES if shown[name] is not None}


def _compute(stages: Mapping[str, _Sum], *, on_device: bool) -> tuple[float | None, float]:
    """Mean in ms of a batch, and seconds of all."""
    if on_device:
        return stages["execute"].mean_ms, stages["execute"].seconds
    run_ms = stages["run"].mean_ms
    hooks_s = sum(stages[name].seconds for name in _HOOKS)
    if run_ms is None:
        return None, 0.0
    hooks_ms = sum(stages[name].mean_ms or 0.0 for name in _HOOKS)
    return max(0.0, run_ms - hooks_ms), max(0.0, stages["run"].seconds - hooks_s)


def _copy_share(stages: Mapping[str, _Sum], cycle_ms: float | None) -> float | None:
    copies_ms = _total_ms([stages["h2d"], stages["d2h"]])
    return None if copies_ms is None or not cycle_ms else copies_ms / cycle_ms


def _total_ms(stages: Iterable[_Sum]) -> float | None:
    known = [stage.mean_ms for stage in stages if stage.mean_ms is not None]
    return sum(known) if known else None


def _queue(observation: Observation, model: str) -> tuple[float, float, float]:
    """Mean tasks and rows that nobody held, and live workers at the end."""
    looks = [queues[model] for queues in observation.queues if model in queues]
    if not looks:
        return 0.0, 0.0, 0.0
    tasks = rows = 0.0
    for look in looks:
        depth = look.high + look.normal + look.low
        waiting = max(0, depth - look.claimed)
        tasks += waiting
        rows += look.rows * waiting / depth if depth else 0.0
    return tasks / len(looks), rows / len(looks), float(looks[-1].workers)


def _variation(counts: list[tuple[float, float]]) -> float | None:
    total = sum(count for _, count in counts)
    if not total:
        return None
    middles, lower = [], 0.0
    for bound, count in counts:
        # Bounds are powers of two, so a bucket's middle lies within a third of all its values.
        middles.append((lower + 1 if math.isinf(bound) else (lower + 1 + bound) / 2, count))
        lower = bound
    mean = sum(middle * count for middle, count in middles) / total
    squares = sum(count * (middle - mean) ** 2 for middle, count in middles)
    return math.sqrt(squares / total) / mean


def _grown(before: Page, after: Page, name: str, **labels: str) -> float:
    """What a counter grew by; a worker that was started again counts from 0."""
    now, then = after.value(name, **labels) or 0.0, before.value(name, **labels) or 0.0
    return now - then if now >= then else now


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None
