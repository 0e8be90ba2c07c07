"""TLS with real certificates: a server that cannot be verified gets nothing from us."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from producer import Client
from producer.config import ProducerSettings
from producer.errors import RedisUnavailable, TlsFailed
from tests.support import models as onnx_models
from tests.support.processes import ROOT, start_worker
from tests.support.tls import Pair, make_ca, make_cert, tls_in_front
from workers.app import make_app

ROWS = np.random.default_rng(5).integers(0, 256, (20, 16), dtype=np.uint8)
NAMES = "DNS:localhost,IP:127.0.0.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ca(folder: Path) -> Pair:
    return make_ca(folder, "good-ca")


@pytest.fixture(scope="module")
def other_ca(folder: Path) -> Pair:
    return make_ca(folder, "other-ca")


@pytest.fixture(scope="module")
def plain_port(redis_url: str) -> int:
    port = urlsplit(redis_url).port
    assert port is not None
    return port


@pytest.fixture(scope="module")
def tls_port(folder: Path, ca: Pair, plain_port: int) -> Iterator[int]:
    with tls_in_front(plain_port, make_cert(folder, "server", ca, NAMES)) as port:
        yield port


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "URL_FILE", "PASSWORD_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"TRTQ_REDIS_{name}", raising=False)


def client(port: int, ca: Path | str = "", host: str = "localhost") -> Client:
    return Client(
        settings=ProducerSettings(redis_url=f"rediss://{host}:{port}/0", redis_ca=str(ca))
    )


def test_clients_workers_and_celery_verify_and_work(
    tls_port: int, ca: Pair, tmp_path: Path
) -> None:
    onnx_models.checksum_model(tmp_path / "checksum.onnx", 16)
    onnx_models.write_config(tmp_path, "checksum", max_batch=4)
    url = f"rediss://localhost:{tls_port}/0"
    worker = start_worker(url, tmp_path, redis_ca=str(ca.cert))
    try:
        with client(tls_port, ca.cert) as made:
            sums = onnx_models.checksum(ROWS).tolist()
            assert [int(s) for s in made.map("checksum", ROWS)] == sums
        environment = {**os.environ, "TRTQ_REDIS_URL": url, "TRTQ_REDIS_CA": str(ca.cert)}
        for command in (
            ("producer.cli", "status", "--json"),
            ("celery", "-A", "workers.app", "inspect", "ping"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr
    finally:
        assert worker.stop() == 0
    assert "insecure" not in worker.text


def test_a_server_of_an_unknown_ca_is_refused(
    tls_port: int, ca: Pair, other_ca: Pair, tmp_path: Path
) -> None:
    for trusted in (other_ca.cert, ""):
        with pytest.raises(TlsFailed, match=r"cannot be trusted .*TRTQ_REDIS_CA"):
            client(tls_port, trusted).start()
    onnx_models.checksum_model(tmp_path / "checksum.onnx", 16)
    onnx_models.write_config(tmp_path, "checksum")
    url = f"rediss://localhost:{tls_port}/0"
    worker = start_worker(url, tmp_path, wait=False, redis_ca=str(other_ca.cert))
    try:
        assert worker.process.wait(40) == 78, worker.text
    finally:
        worker.stop()
    assert "TRTQ_REDIS_CA" in worker.text


def test_a_server_of_another_name_is_refused(
    folder: Path, ca: Pair, tls_port: int, plain_port: int
) -> None:
    with client(tls_port, ca.cert, host="127.0.0.1"):
        pass
    elsewhere = make_cert(folder, "elsewhere", ca, "DNS:redis.example")
    with tls_in_front(plain_port, elsewhere) as port:
        for host in ("localhost", "127.0.0.1"):
            with pytest.raises(TlsFailed, match=r"connect by a name that is in the certificate"):
                client(port, ca.cert, host).start()


def test_celery_itself_refuses_what_it_cannot_verify(
    folder: Path,
    ca: Pair,
    other_ca: Pair,
    tls_port: int,
    plain_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = make_cert(folder, "elsewhere2", ca, "DNS:redis.example")
    with tls_in_front(plain_port, elsewhere) as wrong_name:
        for port, trusted, reason in (
            (tls_port, ca, ""),
            (tls_port, other_ca, "CERTIFICATE_VERIFY_FAILED"),
            (wrong_name, ca, "CERTIFICATE_VERIFY_FAILED"),
        ):
            monkeypatch.setenv("TRTQ_REDIS_URL", f"rediss://localhost:{port}/0")
            monkeypatch.setenv("TRTQ_REDIS_CA", str(trusted.cert))
            made = make_app()
            with made.connection_for_write() as broker:
                for ping in (
                    lambda broker=broker: broker.default_channel.client.ping(),
                    made.backend.client.ping,
                ):
                    if reason:
                        with pytest.raises(Exception, match=reason):
                            ping()
                    else:
                        assert ping()


def test_a_server_that_asks_for_a_certificate(
    folder: Path, ca: Pair, other_ca: Pair, plain_port: int
) -> None:
    server = make_cert(folder, "strict", ca, NAMES)
    ours = make_cert(folder, "ours", other_ca, "DNS:client")
    with tls_in_front(plain_port, server, client_ca=other_ca.cert) as port:
        settings = ProducerSettings(
            redis_url=f"rediss://localhost:{port}/0",
            redis_ca=str(ca.cert),
            redis_cert=str(ours.cert),
            redis_key=str(ours.key),
        )
        with Client(settings=settings) as made:
            assert {spec.name for spec in made.models()} <= {"checksum"}
        with pytest.raises((TlsFailed, RedisUnavailable), match="TRTQ_REDIS_CERT"):
            client(port, ca.cert).start()


def test_a_port_without_tls_is_told(plain_port: int, ca: Pair) -> None:
    settings = ProducerSettings(
        redis_url=f"rediss://localhost:{plain_port}/0", redis_ca=str(ca.cert), connect_timeout_s=1
    )
    with pytest.raises(RedisUnavailable, match="does it speak TLS on that port"):
        Client(settings=settings).start()
