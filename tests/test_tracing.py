"""Spans from submit to reply: the client's in memory, a real worker's in a file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer import Client
from producer.config import ProducerSettings
from producer.errors import EngineFailed, MissingExtra, WrongShape
from producer.task import InferenceTask
from producer.tracing import import_api
from producer.wire import encode_task
from tests.support import models as onnx_models
from tests.support.processes import ROOT, WorkerHandle, start_worker, until
from workers.tracing import NO_TRACING, TracingOwner, trace_of

sdk = pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased  # noqa: E402

Spans = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    onnx_models.row_failing_model(made / "failing.onnx")
    onnx_models.write_config(made, "failing", max_batch=8)
    return made


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    return folder / "spans.jsonl"


@pytest.fixture(scope="module", autouse=True)
def worker(redis_url: str, folder: Path, written: Path) -> Iterator[WorkerHandle]:
    handle = start_worker(
        redis_url,
        folder,
        app="tests.support.traced_worker",
        tracing="1",
        test_spans=str(written),
    )
    yield handle
    assert handle.stop() == 0


@pytest.fixture(scope="module")
def memory() -> InMemorySpanExporter:
    """Where this process' spans go. A process has one provider, once and for all."""
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def client(redis_url: str, memory: InMemorySpanExporter) -> Iterator[Client]:
    memory.clear()
    with Client(settings=ProducerSettings(redis_url=redis_url, tracing=True)) as made:
        yield made


def worker_spans(written: Path, name: str) -> Spans:
    lines = written.read_text().splitlines() if written.exists() else []
    return [span for span in map(json.loads, lines) if span["name"] == name]


def of_trace(spans: Spans, trace_id: int) -> Spans:
    return [span for span in spans if int(span["context"]["trace_id"], 16) == trace_id]


def test_one_trace_from_submit_to_reply(
    client: Client, memory: InMemorySpanExporter, written: Path
) -> None:
    tracer = trace.get_tracer("test")
    with tracer.start_as_current_span("request") as request:
        ticket = client.submit("failing", np.int64(4))
    assert ticket.result(timeout=20) == 2
    (submitted,) = until(lambda: [s for s in memory.get_finished_spans() if s.name != "request"])
    trace_id = request.get_span_context().trace_id
    assert submitted.name == "trtq.submit"
    assert submitted.kind is trace.SpanKind.PRODUCER
    assert submitted.context.trace_id == trace_id
    assert submitted.parent.span_id == request.get_span_context().span_id
    assert submitted.attributes["trtq.task_id"] == ticket.task_id
    assert submitted.status.is_ok or submitted.status.status_code is trace.StatusCode.UNSET
    for name in ("trtq.queue_wait", "trtq.reply"):
        (span,) = until(lambda name=name: of_trace(worker_spans(written, name), trace_id))
        assert int(span["parent_id"], 16) == submitted.context.span_id
        assert span["attributes"] == {"trtq.model": "failing", "trtq.task_id": ticket.task_id}
        assert span["end_time"] >= span["start_time"]


def test_a_batch_is_linked_to_every_task(
    client: Client, memory: InMemorySpanExporter, written: Path
) -> None:
    tickets = [client.submit("failing", np.int64(place)) for place in range(8)]
    for ticket in tickets:
        ticket.result(timeout=20)

    def submitted() -> dict[int, int]:
        found = {s.context.span_id: s.context.trace_id for s in memory.get_finished_spans()}
        return found if len(found) == 8 else {}

    wanted = until(submitted)

    def batches() -> Spans:
        found = [
            span
            for span in worker_spans(written, "trtq.batch")
            if {int(link["context"]["span_id"], 16) for link in span["links"]} & set(wanted)
        ]
        return found if sum(span["attributes"]["trtq.tasks"] for span in found) == 8 else []

    found = until(batches)
    linked = [int(link["context"]["span_id"], 16) for span in found for link in span["links"]]
    assert sorted(linked) == sorted(wanted)
    assert sum(span["attributes"]["trtq.rows"] for span in found) == 8
    assert all(span["parent_id"] is None for span in found)
    assert not {int(span["context"]["trace_id"], 16) for span in found} & set(wanted.values())


def test_failures_are_marked(client: Client, memory: InMemorySpanExporter, written: Path) -> None:
    ticket = client.submit("failing", np.int64(99))
    assert isinstance(ticket.exception(timeout=20), EngineFailed)
    (submitted,) = until(memory.get_finished_spans)
    assert submitted.status.status_code is trace.StatusCode.ERROR
    assert submitted.attributes["trtq.error_code"] == "engine_failed"

    def failed() -> Spans:
        return [
            span
            for span in worker_spans(written, "trtq.batch")
            if int(span["links"][0]["context"]["span_id"], 16) == submitted.context.span_id
        ]

    (batch,) = until(failed)
    assert batch["status"]["status_code"] == "ERROR"
    assert batch["events"][0]["name"] == "exception"


def test_an_input_that_is_refused_makes_no_span(
    client: Client, memory: InMemorySpanExporter
) -> None:
    with pytest.raises(WrongShape):
        client.submit("failing", np.zeros((2, 3), np.int64))
    assert memory.get_finished_spans() == ()


def test_a_span_ends_where_the_task_cannot_be_sent(
    client: Client, memory: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(letter: object) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr(client._outbox, "put", broken)
    with pytest.raises(OSError, match="no more memory"):
        client.submit("failing", np.int64(1))
    (submitted,) = memory.get_finished_spans()
    assert submitted.status.status_code is trace.StatusCode.ERROR


def test_off_by_default(redis_url: str, memory: InMemorySpanExporter, written: Path) -> None:
    memory.clear()
    with Client(redis_url) as client:
        ticket = client.submit("failing", np.int64(2))
        assert ticket.result(timeout=20) == 1
    assert memory.get_finished_spans() == ()
    assert ticket.task_id not in written.read_text()


def test_what_is_not_sampled_makes_no_span_in_the_worker(
    redis_url: str, memory: InMemorySpanExporter, written: Path
) -> None:
    unsampled = sdk.TracerProvider(sampler=ParentBased(ALWAYS_OFF)).get_tracer("test")
    memory.clear()
    with (
        Client(settings=ProducerSettings(redis_url=redis_url, tracing=True)) as client,
        unsampled.start_as_current_span("request"),
    ):
        first = client.submit("failing", np.int64(2))
        assert first.result(timeout=20) == 1
    with Client(settings=ProducerSettings(redis_url=redis_url, tracing=True)) as client:
        later = client.submit("failing", np.int64(2))
        assert later.result(timeout=20) == 1
    until(lambda: later.task_id in written.read_text())
    assert first.task_id not in written.read_text()


def test_nothing_needs_opentelemetry() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
import producer, workers.app
from workers.tracing import TracingOwner
TracingOwner(on=False, node="n").start()
try:
    TracingOwner(on=True, node="n").start()
except producer.errors.MissingExtra as failure:
    print(failure)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "trtq[tracing]" in done.stdout


def test_a_task_without_a_context_has_the_same_bytes() -> None:
    task = InferenceTask("c-1", 1)
    assert encode_task(task) == encode_task(task._replace(trace=None))
    traced = task._replace(trace={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert trace_of(traced) == ("c-1", traced.trace)
    assert trace_of(task) is None


@pytest.mark.parametrize(
    "carrier",
    [
        {},
        {"traceparent": "x" * 5000},
        {"other": "1"},
        {"traceparent": f"00-{'0' * 32}-{'b' * 16}-01"},
    ],
)
def test_a_context_that_is_none_is_ignored(
    carrier: dict[str, str], memory: InMemorySpanExporter
) -> None:
    memory.clear()
    owner = TracingOwner(on=True, node="n")
    owner.start()
    task = InferenceTask("c-1", 1, trace=carrier)
    owner.of("m").queue_waits([(task, 5)], 1000)
    assert memory.get_finished_spans() == ()
    owner.close()


def test_nothing_is_made_when_off() -> None:
    owner = TracingOwner(on=False, node="n")
    owner.start()
    assert owner.of("m") is NO_TRACING
    owner.close()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.trace")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r"trtq\[tracing\]"):
        import_api()


def test_a_worker_sends_otlp_where_the_standard_variables_say(
    redis_url: str, folder: Path, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    onnx_models.row_failing_model(tmp_path / "sent.onnx")
    onnx_models.write_config(tmp_path, "sent")
    worker = start_worker(redis_url, tmp_path, name="otlp", tracing="1")
    try:
        assert client.submit("sent", np.int64(2)).result(timeout=20) == 1
    finally:
        assert worker.stop() == 0
        server.shutdown()
        server.server_close()
    sent = b"".join(bodies)
    for text in (b"trtq.queue_wait", b"trtq.batch", b"trtq.reply", b"trtq-worker", b"otlp@"):
        assert text in sent
