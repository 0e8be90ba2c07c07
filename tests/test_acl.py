"""Access rules on a real Redis: each role can do its work, and nothing else."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from celery import Celery
from typer.testing import CliRunner

from producer import Client, keys
from producer.acl import Role, User, parse_user, rules
from producer.cli import app
from producer.connection import connect
from producer.embedded import free_port, server_binary
from producer.errors import AccessDenied, Cancelled, ConfigError
from producer.exporter import QueueCollector
from producer.scripts import script
from tests.support import models as onnx_models
from tests.support.access import Guarded, guarded_redis
from tests.support.processes import ROOT, WorkerHandle, start_worker, until

ROWS = np.random.default_rng(5).integers(0, 256, (40, 16), dtype=np.uint8)
USERS = [
    User("gpu", Role.WORKER),
    User("alice", Role.PRODUCER),
    User("bob", Role.PRODUCER, ("other",)),
    User("web", Role.CELERY),
    User("graphs", Role.MONITOR),
    User("ops", Role.OPERATOR),
    User("flower", Role.FLOWER),
]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_redis(USERS, tmp_path_factory.mktemp("acl")) as made:
        yield made


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(folder / "checksum.onnx", 16)
    rate_limit = {"rows_per_s": 1e6, "per_client_rows_per_s": 1e6}
    onnx_models.write_config(folder, "checksum", max_batch=4, rate_limit=rate_limit)
    return folder


@pytest.fixture(scope="module")
def workers(guarded: Guarded, models: Path) -> Iterator[list[WorkerHandle]]:
    url = guarded.url("gpu")
    started = [
        start_worker(url, models, wait=False),
        start_worker(url, models, name="infer", queues="trtq.infer", concurrency=2, wait=False),
    ]
    try:
        for worker in started:
            worker.wait_ready()
        yield started
    finally:
        for worker in started:
            worker.stop()


@pytest.fixture(autouse=True)
def no_denial_before(guarded: Guarded) -> None:
    guarded.admin.execute_command("ACL", "LOG", "RESET")


def trtq(*command: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "producer.cli", *command],
        cwd=ROOT,
        env={**os.environ, "TRTQ_REDIS_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_producer_can_do_its_work(guarded: Guarded, workers: list[WorkerHandle]) -> None:
    with Client(guarded.url("alice")) as client:
        assert client.client_id.startswith("alice.")
        assert [spec.name for spec in client.models()] == ["checksum"]
        sums = onnx_models.checksum(ROWS).tolist()
        assert [int(s) for s in client.map("checksum", ROWS)] == sums
        kept = client.submit("checksum", ROWS[0], store=True)
        kept.result(20)
        assert int(client.result(kept.task_id)[0]) == sums[0]
        for _ in range(2):
            assert int(client.submit("checksum", ROWS[0], key="k").result(20)) == sums[0]
        repeats = [client.submit("checksum", ROWS[1], key="k1") for _ in range(3)]
        assert [int(ticket.result(20)) for ticket in repeats] == [sums[1]] * 3
        client.submit("checksum", ROWS[2], key="k2").cancel()
        tickets = [client.submit("checksum", row) for row in ROWS]
        taken_back = [ticket.cancel() for ticket in tickets]
        for ticket, taken in zip(tickets, taken_back, strict=True):
            outcome = ticket.exception(20)
            assert isinstance(outcome, Cancelled) or (outcome is None and not taken)
    assert guarded.denials() == []


def test_a_celery_caller_can_do_its_work(guarded: Guarded, workers: list[WorkerHandle]) -> None:
    app = Celery(broker=guarded.url("web"), backend=guarded.url("web"), set_as_current=False)
    pending = app.send_task("trtq.infer", args=["checksum", ROWS[0].tolist()], queue="trtq.infer")
    assert pending.get(timeout=30) == onnx_models.checksum(ROWS)[0]
    assert guarded.denials() == []


def test_operators_can_do_their_work(guarded: Guarded, workers: list[WorkerHandle]) -> None:
    for user in ("graphs", "ops"):
        assert "checksum" in trtq("status", "--json", url=guarded.url(user)).stdout
        assert "checksum" in trtq("models", "--json", url=guarded.url(user)).stdout
    # An entry that nobody claims: its key is freed by the operator.
    spec = guarded.admin.hget("trtq:models", "checksum")
    guarded.admin.hset("trtq:models", "idle", spec.replace(b'"checksum"', b'"idle"'))
    with Client(guarded.url("alice")) as client:
        keyed = [client.submit("idle", ROWS[0], key="k") for _ in range(2)]
        until(lambda: all(ticket.accepted() for ticket in keyed))
        assert trtq("purge", "idle", "--yes", url=guarded.url("ops")).returncode == 0
        assert all(isinstance(ticket.exception(20), Cancelled) for ticket in keyed)
        again = client.submit("idle", ROWS[0], key="k")
        until(again.accepted)
        assert again.cancel()
    guarded.admin.hdel("trtq:models", "idle")
    assert trtq("purge", "checksum", "--yes", url=guarded.url("ops")).returncode == 0
    # A frame that nobody can read becomes a dead letter.
    guarded.admin.xadd("trtq:{checksum}:in:high", {"d": b"no task"})
    with Client(guarded.url("alice")) as client:
        client.submit("checksum", ROWS[0]).result(20)
    for user in ("graphs", "ops"):
        (letter,) = json.loads(trtq("dead", "list", "--json", url=guarded.url(user)).stdout)
    shown = trtq("dead", "show", "checksum", letter["id"], url=guarded.url("ops"))
    assert shown.returncode == 0
    dropped = trtq("dead", "drop", "checksum", "--all", "--yes", url=guarded.url("ops"))
    assert dropped.returncode == 0
    with connect(guarded.url("graphs")) as connection:
        (up, *rest) = QueueCollector(connection).collect()
    assert up.samples[0].value == 1
    assert any(metric.name == "trtq_queue_tasks" for metric in rest)
    assert guarded.denials() == []
    refused = trtq("purge", "checksum", "--yes", url=guarded.url("graphs"))
    assert refused.returncode == 2
    assert "error [access_denied]" in refused.stderr


def test_celerys_remote_control_works(guarded: Guarded, workers: list[WorkerHandle]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "workers.app", "inspect", "conf"],
        cwd=ROOT,
        env={**os.environ, "TRTQ_REDIS_URL": guarded.url("flower")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "2 nodes online" in found.stdout
    for user in ("gpu", "flower"):
        assert guarded.password(user) not in found.stdout + found.stderr
    assert guarded.denials() == []


def test_flower_can_do_its_work(
    guarded: Guarded, workers: list[WorkerHandle], tmp_path: Path
) -> None:
    port = free_port()
    log = tmp_path / "flower.log"
    with log.open("wb") as output:
        flower = subprocess.Popen(
            [
                *(sys.executable, "-m", "celery", "-A", "workers.app", "flower"),
                *("--address=127.0.0.1", f"--port={port}"),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "TRTQ_REDIS_URL": guarded.url("flower"),
                "FLOWER_UNAUTHENTICATED_API": "true",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def page(path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    try:
        node = f"cpu@{socket.gethostname()}"
        until(lambda: node in page("/api/workers?refresh=1"), 60)
        with Client(guarded.url("alice")) as client:
            client.submit("checksum", ROWS[0]).result(20)
        until(lambda: keys.SERVE_TASK in page("/api/tasks"), 20)
        shown = "".join(page(path) for path in ("/workers", f"/worker/{node}", "/tasks"))
        assert node in shown
    finally:
        flower.terminate()
        flower.wait(20)
    for user in ("gpu", "flower", "alice"):
        assert guarded.password(user) not in shown + log.read_text(errors="replace")
    assert guarded.denials() == []


def test_a_worker_can_do_its_work(guarded: Guarded, models: Path) -> None:
    worker = start_worker(guarded.url("gpu"), models, name="other")
    assert worker.stop() == 0
    assert guarded.denials() == []
    assert guarded.password("gpu") not in worker.text
    assert "gpu:**@" in worker.text


STREAM = "trtq:{checksum}:in:normal"
NOT_FOR_PRODUCERS: list[tuple[Any, ...]] = [
    ("XREADGROUP", "GROUP", "workers", "alice", "STREAMS", STREAM, ">"),
    ("XACK", STREAM, "workers", "1-1"),
    ("XCLAIM", STREAM, "workers", "alice", 0, "1-1"),
    ("XAUTOCLAIM", STREAM, "workers", "alice", 0, "0"),
    ("XREAD", "STREAMS", STREAM, "0"),
    ("XRANGE", STREAM, "-", "+"),
    ("XINFO", "STREAM", STREAM),
    ("XINFO", "CONSUMERS", STREAM, "workers"),
    ("XTRIM", STREAM, "MAXLEN", 0),
    ("XGROUP", "DESTROY", STREAM, "workers"),
    ("DUMP", STREAM),
    ("DEL", STREAM),
    ("UNLINK", STREAM),
    ("EXPIRE", STREAM, 1),
    ("SET", STREAM, "x"),
    ("RENAME", STREAM, "trtq:reply:alice.1"),
    ("COPY", STREAM, "trtq:reply:alice.1"),
    ("HSET", "trtq:models", "checksum", "{}"),
    ("HDEL", "trtq:models", "checksum"),
    ("LRANGE", "trtq:reply:bob.1", 0, -1),
    ("BLMOVE", "trtq:reply:bob.1", "trtq:reply:alice.1", "LEFT", "LEFT", 0.1),
    ("LRANGE", "trtq:reply:alicia.1", 0, -1),
    ("GET", "trtq:result:bob.1-0"),
    ("GET", "trtq:{checksum}:key:bob:1"),
    ("GETSET", "trtq:{checksum}:key:alicia:1", "x"),
    ("GETSET", "trtq:{checksum}:bucket:bob", "x"),
    ("HSET", "trtq:{checksum}:limits", "rows_per_s", 9),
    ("DEL", "trtq:{checksum}:key:alice:1"),
    ("LRANGE", "trtq:{checksum}:dead", 0, -1),
    ("GET", "trtq:worker:cpu"),
    ("GET", "celery-task-meta-1"),
    ("LPUSH", "unacked", "x"),
    ("SADD", "_kombu.binding.celery", "x"),
    ("PUBLISH", "/0.celery.pidbox", "x"),
    ("SUBSCRIBE", "/0.celeryev/worker.heartbeat"),
    ("PSUBSCRIBE", "*"),
    ("KEYS", "*"),
    ("SCAN", 0),
    ("RANDOMKEY",),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CLIENT", "LIST"),
    ("ACL", "LIST"),
    ("INFO",),
    ("MONITOR",),
    ("DEBUG", "SLEEP", 0),
    ("SCRIPT", "FLUSH"),
    ("SHUTDOWN",),
    ("REPLICAOF", "NO", "ONE"),
    ("MODULE", "LIST"),
    ("EVAL", "return redis.call('XRANGE', KEYS[1], '-', '+')", 1, STREAM),
    ("EVAL", "return redis.call('DEL', KEYS[1])", 1, STREAM),
    ("EVAL", "return redis.call('LRANGE', 'trtq:reply:bob.1', 0, -1)", 0),
]


REFUSED = r"no permissions|executing the script|not allowed"


@pytest.mark.parametrize("command", NOT_FOR_PRODUCERS, ids=lambda c: " ".join(map(str, c))[:60])
def test_a_producer_cannot(guarded: Guarded, command: tuple[Any, ...]) -> None:
    admin = guarded.admin
    admin.rpush("trtq:reply:bob.1", "secret")
    admin.set("trtq:result:bob.1-0", "secret")
    with (
        connect(guarded.url("alice")) as connection,
        pytest.raises(redis.exceptions.ResponseError, match=REFUSED),
    ):
        connection.execute_command(*command)
    assert admin.lrange("trtq:reply:bob.1", 0, -1)[:1] == [b"secret"]


@pytest.mark.parametrize(
    "name", ["settle", "claim", "renew", "reclaim", "release", "purge", "beat", "tell", "attend"]
)
def test_a_producer_cannot_run_scripts_of_workers(guarded: Guarded, name: str) -> None:
    key = f"trtq:acl:{name}"
    with connect(guarded.url("alice")) as connection, pytest.raises(redis.exceptions.ResponseError):
        connection.eval(script(name), 1, key)
    assert (("alice", key) in guarded.denials()) or not guarded.admin.exists(key)


def test_a_restricted_producer_is_told(guarded: Guarded, workers: list[WorkerHandle]) -> None:
    with Client(guarded.url("bob")) as client:
        refused = client.submit("checksum", ROWS[0]).exception(10)
        assert isinstance(refused, AccessDenied)
        assert "trtq:{checksum}:in:normal" in refused.message
        assert "trtq acl" in refused.message
    assert {user for user, _ in guarded.denials()} == {"bob"}
    with connect(guarded.url("bob")) as connection:
        for key in ("trtq.checksum", "trtq.infer"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                connection.lpush(key, "x")


def test_a_name_that_does_not_fit_is_told_at_the_start(guarded: Guarded) -> None:
    client = Client(guarded.url("alice"), name="carol")
    with pytest.raises(AccessDenied, match=r"trtq:reply:carol\..*TRTQ_CLIENT_NAME"):
        client.start()


def test_a_refused_login_is_told_without_the_password(guarded: Guarded) -> None:
    url = f"redis://alice:wr0ng@127.0.0.1:{guarded.port}/0"
    with pytest.raises(AccessDenied, match=r"alice:\*\*\*@.*refused the login of user 'alice'"):
        Client(url).start()
    refused = trtq("status", url=url)
    assert refused.returncode == 2
    assert "error [access_denied]" in refused.stderr
    assert "wr0ng" not in refused.stderr


def test_access_taken_while_running_ends_tickets(
    guarded: Guarded, workers: list[WorkerHandle]
) -> None:
    carol = User("carol", Role.PRODUCER)
    guarded.set(carol)
    with Client(guarded.url("carol")) as client:
        assert client.submit("checksum", ROWS[0]).result(20) is not None
        guarded.set(carol, without=["~trtq:reply:carol.*"])
        # What blocks when the rules change is let through.
        until(lambda: isinstance(client.submit("checksum", ROWS[0]).exception(20), AccessDenied))
        guarded.set(carol)
        until(lambda: client.submit("checksum", ROWS[0]).exception(20) is None)


@pytest.mark.parametrize(
    "without", ["+zadd", "~trtq.*", "~_kombu.binding*", "+brpop", "+psubscribe"]
)
def test_a_worker_without_its_rights_ends_and_says_so(
    guarded: Guarded, models: Path, without: str
) -> None:
    user = User("lesser", Role.WORKER)
    guarded.set(user, without=[without])
    guarded.admin.flushall()
    worker = start_worker(guarded.url("lesser"), models, name="lesser", wait=False)
    try:
        assert worker.process.wait(40) == 78, worker.text
    finally:
        worker.stop()
    assert "denies user 'lesser'" in worker.text
    assert "trtq acl" in worker.text
    assert "Traceback" not in worker.text
    assert guarded.password("lesser") not in worker.text


# The rules themselves.


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["acl", *arguments])


def test_the_template_is_what_the_command_prints() -> None:
    printed = run(
        *("--admin", "root", "--worker", "worker", "--producer", "alice"),
        *("--producer", "bob=digits", "--celery", "web", "--monitor", "exporter"),
        *("--operator", "ops", "--flower", "flower"),
    )
    assert printed.exit_code == 0
    assert printed.stdout == (ROOT / "configs" / "redis" / "users.acl").read_text()


def test_redis_loads_the_file_and_nobody_is_let_in_without_login(tmp_path: Path) -> None:
    passwords = tmp_path / "secrets"
    arguments = ("--admin", "root", "--producer", "alice", "--passwords", str(passwords))
    printed = run(*arguments, "--generate")
    assert printed.exit_code == 0
    file = passwords / "alice"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(passwords.stat().st_mode) == 0o700
    assert file.read_text().strip() not in printed.stdout
    # Again, with what is there.
    assert run(*arguments, "--generate").stdout == run(*arguments).stdout == printed.stdout
    acl = tmp_path / "users.acl"
    acl.write_text(printed.stdout)
    port = free_port()
    server = subprocess.Popen(
        [str(server_binary()), "--port", str(port), "--bind", "127.0.0.1", "--aclfile", str(acl)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        login = f"redis://alice:{file.read_text().strip()}@127.0.0.1:{port}/0"

        def answers() -> bool:
            try:
                with connect(login) as connection:
                    return bool(connection.ping())
            except redis.exceptions.ConnectionError:
                return False

        until(answers)
        with (
            connect(f"redis://127.0.0.1:{port}/0") as connection,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            connection.ping()
    finally:
        server.terminate()
        server.wait(10)


def test_redis_refuses_the_template(tmp_path: Path) -> None:
    acl = ROOT / "configs" / "redis" / "users.acl"
    refused = subprocess.run(
        [str(server_binary()), "--port", str(free_port()), "--aclfile", str(acl)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert refused.returncode != 0
    assert "users.acl:2: The password hash must be" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name the users"),
        (("--producer", "a b"), "client name"),
        (("--producer", "alice.b"), "client name"),
        (("--producer", "alice=x y"), "model name"),
        (("--producer", "alice="), "model name"),
        (("--producer", "alice=*"), "model name"),
        (("--worker", "gpu=digits"), "only producers"),
        (("--worker", "default"), "switched off"),
        (("--worker", "x", "--producer", "x"), "named twice"),
        (("--worker", "x", "--generate"), "--passwords"),
        (("--worker", "x", "--passwords", "/nonexistent"), "does not exist"),
    ],
)
def test_users_that_cannot_be(arguments: tuple[str, ...], message: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_channels_are_of_one_database() -> None:
    (_, line) = rules([parse_user("gpu", Role.WORKER)], None, db=3)
    assert "&/3.celery.pidbox" in line.split()
    assert "&/0" not in line
    with pytest.raises(ConfigError):
        parse_user("gpu=m", Role.WORKER)
