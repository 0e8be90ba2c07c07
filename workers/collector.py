"""A worker's own counts as Prometheus metrics, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from workers.gpu import GpuReader
from workers.health import liveness, readiness
from workers.runtime import Runtime
from workers.served import Served
from workers.stages import QUEUE_WAIT, HistogramState

_MS = 1000.0


class WorkerCollector(Collector):
    """Metrics of one worker process. `runtime()` is None in a process that serves no models."""

    def __init__(
        self, runtime: Callable[[], Runtime | None], device: str, gpu: GpuReader | None
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._gpu = gpu

    def collect(self) -> Iterable[Metric]:
        """All metrics now."""
        runtime = self._runtime()
        models = [] if runtime is None else runtime.models
        yield from _process(runtime, self._device)
        yield from _counters(models)
        yield from _histograms(models)
        yield from _gauges(models)
        if self._gpu is not None:
            yield from _gpu(self._gpu)


def _process(runtime: Runtime | None, device: str) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "trtq_worker_healthy",
        "1 while every thread of the worker lives and none hangs.",
        labels=["device"],
    )
    up.add_metric([device], float(liveness(runtime).ok))
    yield up
    ready = GaugeMetricFamily(
        "trtq_worker_ready",
        "1 while the worker takes work: models warm, Redis answers, no stop asked for.",
        labels=["device"],
    )
    ready.add_metric([device], float(readiness(runtime).ok))
    yield ready
    if runtime is None or runtime.presence is None:
        return
    yield GaugeMetricFamily(
        "trtq_worker_heartbeat_age_seconds",
        "Time since Redis took the last heartbeat.",
        value=runtime.presence.beat_age_s,
    )
    turn_age_s = runtime.turn_age_s
    if turn_age_s is not None:
        yield GaugeMetricFamily(
            "trtq_worker_turn_age_seconds",
            "Time since the last turn ended; 0 while one runs.",
            value=turn_age_s,
        )


def _counters(models: list[Served]) -> Iterator[Metric]:
    answered = CounterMetricFamily(
        "trtq_tasks_answered", "Tasks answered, with a result or an error.", labels=["model"]
    )
    failed = CounterMetricFamily(
        "trtq_tasks_failed",
        "Tasks that ended with an error, by its code.",
        labels=["model", "reason"],
    )
    events = CounterMetricFamily(
        "trtq_task_events",
        "What happened to tasks besides a result, by reason; docs/failures.md lists all.",
        labels=["model", "event", "reason"],
    )
    rows = CounterMetricFamily("trtq_rows", "Rows that have run.", labels=["model"])
    padded = CounterMetricFamily(
        "trtq_padded_rows",
        "Rows that filled batches up to a size that the engine has warmed.",
        labels=["model"],
    )
    batches = CounterMetricFamily("trtq_batches", "Batches that have run.", labels=["model"])
    busy = CounterMetricFamily(
        "trtq_busy_seconds", "Time in which at least one slot ran a batch.", labels=["model"]
    )
    for served in models:
        name, counts = served.config.name, served.counters
        answered.add_metric([name], counts.tasks)
        rows.add_metric([name], counts.rows)
        padded.add_metric([name], counts.padded_rows)
        batches.add_metric([name], counts.batches)
        busy.add_metric([name], served.feed.busy_ms / _MS)
        for code, count in sorted(served.stages.failures().items()):
            failed.add_metric([name, code], count)
        for (event, reason), count in sorted(served.incidents.counts().items()):
            events.add_metric([name, event, reason], count)
    yield from (answered, failed, events, rows, padded, batches, busy)


def _histograms(models: list[Served]) -> Iterator[Metric]:
    sizes = HistogramMetricFamily("trtq_batch_rows", "Rows of a batch.", labels=["model"])
    waits = HistogramMetricFamily(
        "trtq_queue_wait_seconds",
        "From Redis' acceptance of a task until a worker claimed it.",
        labels=["model"],
    )
    stages = HistogramMetricFamily(
        "trtq_stage_duration_seconds",
        "Stages of a batch: hold, gather, run (of it preprocess, h2d, execute, d2h, "
        "postprocess), scatter, reply.",
        labels=["model", "stage"],
    )
    for served in models:
        name = served.config.name
        _add(sizes, [name], served.stages.batches(), 1.0)
        for stage, state in served.stages.durations().items():
            if stage == QUEUE_WAIT:
                _add(waits, [name], state, _MS)
            elif state.observations:
                _add(stages, [name, stage], state, _MS)
    yield from (sizes, waits, stages)


def _add(
    family: HistogramMetricFamily, labels: list[str], state: HistogramState, unit: float
) -> None:
    buckets = []
    total = 0
    bounds = (f"{bound / unit:g}" for bound in state.bounds)
    for bound, count in zip((*bounds, "+Inf"), state.counts, strict=True):
        total += count
        buckets.append((bound, total))
    family.add_metric(labels, buckets, state.total / unit)


def _gauges(models: list[Served]) -> Iterator[Metric]:
    wanted: list[tuple[str, str, Callable[[Served], float | None]]] = [
        ("trtq_slots", "Slots of the model.", lambda m: m.config.slots),
        ("trtq_slots_busy", "Slots that run a batch.", lambda m: m.feed.running),
        ("trtq_held_rows", "Rows claimed that wait for a slot.", lambda m: m.feed.held_rows),
        ("trtq_unanswered_rows", "Rows claimed and not answered.", lambda m: m.ledger.rows),
        ("trtq_max_batch_rows", "Most rows of a batch.", lambda m: m.spec.max_batch),
        (
            "trtq_max_delay_seconds",
            "Most that a batch waits for more tasks while another one runs.",
            lambda m: m.config.max_delay_ms / _MS,
        ),
        ("trtq_pinned_bytes", "Pinned host memory of the slots.", _pinned_bytes),
    ]
    for name, text, value in wanted:
        family = GaugeMetricFamily(name, text, labels=["model"])
        for served in models:
            found = value(served)
            if found is not None:
                family.add_metric([served.config.name], found)
        yield family


def _pinned_bytes(served: Served) -> float | None:
    found: int | None = getattr(served.engine, "pinned_bytes", None)
    return found


def _gpu(reader: GpuReader) -> Iterator[Metric]:
    state = reader.read()
    if state is None:
        return
    wanted = [
        ("utilization_ratio", "Share of time in which a kernel ran.", state.utilization_ratio),
        ("memory_used_bytes", "Device memory in use.", state.memory_used_bytes),
        ("memory_total_bytes", "Device memory.", state.memory_total_bytes),
        ("power_watts", "Power drawn.", state.power_watts),
        ("temperature_celsius", "Temperature.", state.temperature_celsius),
    ]
    for name, text, value in wanted:
        if value is not None:
            family = GaugeMetricFamily(f"trtq_gpu_{name}", text, labels=["gpu", "name"])
            family.add_metric([state.uuid, state.name], value)
            yield family
