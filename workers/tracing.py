"""Spans of OpenTelemetry for what a worker does with tasks whose client traces them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

from producer.entries import Settlement
from producer.errors import MissingExtra
from producer.task import InferenceTask
from producer.tracing import MODEL, NAME, ROWS, TASK_ID, Api, import_api

_NOTHING = nullcontext()
_NS_PER_MS = 1_000_000
_FLUSH_MS = 2000

Carrier: TypeAlias = "Mapping[str, str] | None"


class Traceable(Protocol):
    """A held task."""

    task: InferenceTask


def trace_of(task: InferenceTask) -> tuple[str, Mapping[str, str]] | None:
    """What a settlement keeps of a task for its reply's span."""
    return (task.task_id, task.trace) if task.trace else None


class Tracing:
    """Makes the spans of one model. Without `tracer` it does nothing.

    Tasks without a sampled context of their own make none: the client decides what is traced.
    """

    def __init__(self, model: str = "", tracer: Any = None, api: Api | None = None) -> None:
        self._model = model
        self._tracer = tracer
        self._api = api

    def queue_waits(self, tasks: Sequence[tuple[InferenceTask, int]], now_ms: int) -> None:
        """A span `trtq.queue_wait` a task: claimed at `now_ms` after a wait in ms, Redis' clock."""
        if self._tracer is None:
            return
        for task, waited_ms in tasks:
            self._span("trtq.queue_wait", task.trace, task.task_id, now_ms, waited_ms)

    def batch(self, batch: Sequence[Traceable]) -> AbstractContextManager[object]:
        """A span `trtq.batch` around the block, of a trace of its own, linked to every task's.

        Spans that hooks make are its children. It records what the block raises.
        """
        if self._tracer is None:
            return _NOTHING
        tasks = [held.task for held in batch]
        links = [link for task in tasks if (link := self._link(task.trace)) is not None]
        if not links:
            return _NOTHING
        opened: AbstractContextManager[object] = self._tracer.start_as_current_span(
            "trtq.batch",
            links=links,
            attributes={
                MODEL: self._model,
                ROWS: sum(task.rows for task in tasks),
                "trtq.tasks": len(tasks),
            },
        )
        return opened

    def replies(self, settlements: Sequence[Settlement], took_ms: float) -> None:
        """A span `trtq.reply` for each traced task: Redis took the answers just now."""
        if self._tracer is None:
            return
        now_ms = time.time() * 1000
        for settlement in settlements:
            if settlement.trace is not None:
                task_id, carrier = settlement.trace
                self._span("trtq.reply", carrier, task_id, now_ms, took_ms)

    def _span(
        self, name: str, carrier: Carrier, task_id: str, end_ms: float, took_ms: float
    ) -> None:
        assert self._api is not None
        context = self._context(carrier)
        if context is None:
            return
        end_ns = int(end_ms * _NS_PER_MS)
        span = self._tracer.start_span(
            name,
            context=context,
            kind=self._api.trace.SpanKind.CONSUMER,
            attributes={MODEL: self._model, TASK_ID: task_id},
            start_time=end_ns - int(took_ms * _NS_PER_MS),
        )
        span.end(end_ns)

    def _link(self, carrier: Carrier) -> Any:
        context = self._context(carrier)
        if context is None:
            return None
        assert self._api is not None
        trace = self._api.trace
        return trace.Link(trace.get_current_span(context).get_span_context())

    def _context(self, carrier: Carrier) -> Any:
        """The context that came with a task, None where it has none or is not sampled."""
        if not carrier:
            return None
        assert self._api is not None
        context = self._api.propagator.extract(carrier)
        found = self._api.trace.get_current_span(context).get_span_context()
        return context if found.is_valid and found.trace_flags.sampled else None


NO_TRACING = Tracing()


class TracingOwner:
    """The worker's tracer provider: the process' own where it has one, else one that sends OTLP.

    The OTLP exporter reads the standard OTEL_ environment variables. With `on` false nothing is
    imported and nothing made.
    """

    def __init__(self, *, on: bool, node: str) -> None:
        self._on = on
        self._node = node
        self._api: Api | None = None
        self._provider: Any = None
        self._owned = False

    def start(self) -> None:
        """Raises MissingExtra without the packages."""
        if not self._on:
            return
        self._api = import_api()
        self._provider = self._api.trace.get_tracer_provider()
        if isinstance(self._provider, self._api.trace.ProxyTracerProvider):
            self._provider = _otlp_provider(self._node)
            self._owned = True

    def of(self, model: str) -> Tracing:
        """What one model's threads use."""
        if self._provider is None:
            return NO_TRACING
        return Tracing(model, self._provider.get_tracer(NAME), self._api)

    def close(self) -> None:
        """Sends what is left, for two seconds at most."""
        provider, self._provider = self._provider, None
        if provider is not None and hasattr(provider, "force_flush"):
            provider.force_flush(_FLUSH_MS)
            if self._owned:
                provider.shutdown()


def _otlp_provider(node: str) -> Any:
    try:
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as failure:
        raise MissingExtra(
            f"TRTQ_TRACING needs OpenTelemetry's SDK and OTLP exporter ({failure}): "
            "pip install 'trtq[tracing]'"
        ) from failure
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, where they are set, go before.
    named = {"service.name": "trtq-worker", "service.instance.id": node}
    resource = resources.Resource(named).merge(resources.OTELResourceDetector().detect())
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return provider
