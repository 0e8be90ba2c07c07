"""The worker's HTTP port: /metrics, /healthz, /readyz, and POST /drain from this machine."""

from __future__ import annotations

import ipaddress
import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from producer.errors import Unavailable
from workers.health import Report

log = logging.getLogger("trtq.endpoint")

_TIMEOUT_S = 5.0
_MOST_REQUESTS = 16


class Endpoint:
    """Serves the port in threads of its own. `drain()` is called for each POST /drain.

    Port 0 takes a free one; `port` says which.
    """

    def __init__(
        self,
        host: str,
        port: int,
        collector: Collector,
        liveness: Callable[[], Report],
        readiness: Callable[[], Report],
        drain: Callable[[], None],
    ) -> None:
        self._host = host
        self.port = port
        self._collector = collector
        self._probes = {"/healthz": liveness, "/readyz": readiness}
        self._drain = drain
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Binds the port; raises Unavailable if it is taken or the address is not ours."""
        registry = CollectorRegistry()
        registry.register(self._collector)
        ProcessCollector(registry=registry)
        handler = _handler(registry, self._probes, self._drain)
        try:
            self._server = _Server((self._host, self.port), handler)
        except (OSError, OverflowError) as failure:
            raise Unavailable(
                f"the metrics port {self._host}:{self.port} cannot be bound ({failure}): "
                "set TRTQ_METRICS_PORT to another one, or to 0 for none"
            ) from failure
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="trtq-endpoint", daemon=True
        )
        self._thread.start()
        log.info("metrics and health at http://%s:%d", self._host, self.port)

    def close(self) -> None:
        """Stops serving and frees the port."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(timeout=_TIMEOUT_S)
            self._thread = None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Waiting for a slow client must not hold up the worker's stop.
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(_MOST_REQUESTS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a request from %s broke off", client_address, exc_info=True)


def _handler(
    registry: CollectorRegistry,
    probes: dict[str, Callable[[], Report]],
    drain: Callable[[], None],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT_S
        server_version = "trtq"
        sys_version = ""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, content_type, encode(registry))
            elif path in probes:
                report = probes[path]()
                status = HTTPStatus.OK if report.ok else HTTPStatus.SERVICE_UNAVAILABLE
                self._json(status, {"ok": report.ok, **report.facts})
            else:
                self._json(HTTPStatus.NOT_FOUND, {"error": "try /metrics, /healthz or /readyz"})

        def do_POST(self) -> None:
            if self.path != "/drain":
                self._json(HTTPStatus.NOT_FOUND, {"error": "only /drain takes POST"})
            elif not _is_local(self.client_address[0]) or self.headers.get("Origin"):
                # Stopping a worker is for its own machine, and never for a web page opened there.
                self._json(HTTPStatus.FORBIDDEN, {"error": "drain from the worker's own machine"})
            else:
                log.info("asked to drain over HTTP")
                self._json(HTTPStatus.ACCEPTED, {"draining": True})
                drain()

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

        def _json(self, status: HTTPStatus, document: dict[str, Any]) -> None:
            self._answer(status, "application/json", json.dumps(document).encode() + b"\n")

        def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _is_local(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
