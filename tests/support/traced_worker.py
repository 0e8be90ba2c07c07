"""A worker whose spans go to a file: `celery -A tests.support.traced_worker`.

TRTQ_TEST_SPANS names it; each span is a line of JSON.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


class FileExporter(SpanExporter):
    """Appends each span as its own JSON form on one line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(json.loads(span.to_json())) + "\n" for span in spans)
        with self._lock, self._path.open("a") as file:
            file.write(lines)
        return SpanExportResult.SUCCESS


_provider = TracerProvider()
_provider.add_span_processor(SimpleSpanProcessor(FileExporter(Path(os.environ["TRTQ_TEST_SPANS"]))))
trace.set_tracer_provider(_provider)

from workers.app import app  # noqa: E402 - the provider is there first, as an operator's would be

__all__ = ["app"]
