"""Spans of OpenTelemetry for submitted tasks. Their context travels in the task (wire.py, `trace`).

Off unless asked for: nothing here imports opentelemetry before `client_tracing` is called. Where
spans go is the application's choice: it configures the SDK, else they go nowhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from producer.errors import MissingExtra, ResultTimeout
from producer.ticket import Ticket

NAME = "trtq"
MODEL = "trtq.model"
TASK_ID = "trtq.task_id"
ROWS = "trtq.rows"
ERROR = "trtq.error_code"


class Api(NamedTuple):
    """What is used of opentelemetry-api: its module `trace`, and W3C's form of a context."""

    trace: Any
    propagator: Any


def import_api() -> Api:
    """Raises MissingExtra without the package."""
    try:
        trace = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    except ImportError as failure:
        raise MissingExtra(
            f"TRTQ_TRACING needs OpenTelemetry ({failure}): pip install 'trtq[tracing]'"
        ) from failure
    return Api(trace, context.TraceContextTextMapPropagator())


class SubmittedSpan:
    """The span of one task, from submit until its ticket ends."""

    __slots__ = ("_error", "_span", "carrier")

    def __init__(self, span: Any, carrier: Mapping[str, str], error: Any) -> None:
        self._span = span
        self._error = error
        #: For the task: W3C's traceparent, and tracestate where there is one.
        self.carrier = carrier

    def end(self, ticket: Ticket) -> None:
        """The ticket has ended."""
        try:
            failure = ticket.exception(timeout=0)
        except ResultTimeout as open_still:
            failure = open_still
        if failure is not None:
            self._span.set_attribute(ERROR, failure.code)
            self._span.set_status(self._error, failure.message)
        self._span.end()

    def refused(self, failure: BaseException) -> None:
        """The task was never sent."""
        self._span.set_status(self._error, str(failure))
        self._span.end()


class ClientTracing:
    """Makes a span `trtq.submit` for each task, a child of the caller's current span."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tracer = api.trace.get_tracer(NAME)

    @contextmanager
    def submit(self, model: str, task_id: str, rows: int) -> Iterator[SubmittedSpan]:
        """Ends the span if the block raises; else the caller ends it with the ticket."""
        trace = self._api.trace
        span = self._tracer.start_span(
            "trtq.submit",
            kind=trace.SpanKind.PRODUCER,
            attributes={MODEL: model, TASK_ID: task_id, ROWS: rows},
        )
        carrier: dict[str, str] = {}
        self._api.propagator.inject(carrier, trace.set_span_in_context(span))
        made = SubmittedSpan(span, carrier, trace.StatusCode.ERROR)
        try:
            yield made
        except BaseException as failure:
            made.refused(failure)
            raise


def client_tracing() -> ClientTracing:
    """Raises MissingExtra without opentelemetry-api."""
    return ClientTracing(import_api())
