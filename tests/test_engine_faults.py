"""An engine that fails on one task among good ones, in a real worker under the real supervisor.

Whatever the engine does, each good task is answered once and right, and the task that it fails
on is answered once, with a named error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from producer import Client, errors, keys
from producer.embedded import EmbeddedRedis
from producer.errors import BatchTimeout, EngineFailed, PoisonTask, TrtqError
from producer.link import Link
from producer.spec import ModelSpec
from producer.task import InferenceTask, Reply, Tensor
from producer.wire import decode_replies, encode_task
from tests.support import models as onnx_models
from tests.support.processes import start_supervised, start_worker, until
from workers.inbox import WorkerInbox
from workers.process import EXIT_FATAL

MODEL = "checksum"
WIDTH = 16
GOOD = 24
#: As tests/support/faulty_worker.py has them.
RAISES, WRONG_SHAPE, WRONG_DTYPE, HANGS, FREEZES, CRASHES = range(250, 256)
#: Long enough to fail the test if an answer had to wait for it.
LONG_LEASE = {"lease_ms": "300000"}
#: A worker that was killed gives nothing back: its tasks come when their lease runs out.
SHORT_LEASE = {"lease_ms": "500", "max_deliveries": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(made / f"{MODEL}.onnx", WIDTH)
    onnx_models.write_config(
        made, MODEL, max_batch=8, slots=2, threads=1, max_delay_ms=0, batch_timeout_s=2
    )
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EmbeddedRedis]:
    """A Redis that knows the model, so that tasks can wait before a worker comes."""
    with EmbeddedRedis() as made:
        assert start_worker(made.url, folder, name="publishes").stop() == 0
        yield made


@pytest.fixture
def raw(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url, protocol=2) as made:
        yield made


class Sender:
    """Adds tasks and reads every reply that Redis ever got for them, doubled ones too."""

    def __init__(self, connection: redis.Redis, client: str) -> None:
        self._redis = connection
        self._client = client
        self._number = 0
        self.inbox = WorkerInbox(Link(connection), MODEL)
        published: Any = connection.hget(keys.MODELS, MODEL)
        self._spec = ModelSpec.model_validate_json(published)

    def add(self, rows: np.ndarray[Any, Any]) -> list[str]:
        """Adds one task a row; returns their ids."""
        tasks = []
        for row in rows:
            self._number += 1
            tensor = Tensor("x", "uint8", (1, WIDTH), row.tobytes())
            tasks.append(InferenceTask(f"{self._client}-{self._number}", 1, (tensor,)))
        frames = [(1, encode_task(task)) for task in tasks]
        _, ids = self.inbox.add(self._spec, 1, self._client, self._number, frames)
        assert None not in ids
        return [task.task_id for task in tasks]

    def replies(self) -> list[Reply]:
        return [
            reply
            for blob in self._redis.lrange(keys.reply(self._client), 0, -1)
            for reply in decode_replies(blob)
        ]

    def consumers(self) -> set[bytes]:
        return {
            one["name"]
            for stream in self.inbox.keys.streams
            for one in self._redis.xinfo_consumers(stream, keys.GROUP)
        }


@pytest.mark.parametrize(
    ("fault", "error", "exit_code", "env"),
    [
        pytest.param(RAISES, EngineFailed, None, LONG_LEASE, id="raises"),
        pytest.param(WRONG_SHAPE, EngineFailed, None, LONG_LEASE, id="wrong-shape"),
        pytest.param(WRONG_DTYPE, EngineFailed, None, LONG_LEASE, id="wrong-dtype"),
        pytest.param(HANGS, BatchTimeout, EXIT_FATAL, LONG_LEASE, id="hangs"),
        pytest.param(FREEZES, PoisonTask, 1, SHORT_LEASE, id="hangs-with-the-interpreter"),
        pytest.param(CRASHES, PoisonTask, -11, SHORT_LEASE, id="crashes"),
    ],
)
def test_one_task_among_good_ones(
    server: EmbeddedRedis,
    raw: redis.Redis,
    folder: Path,
    fault: int,
    error: type[TrtqError],
    exit_code: int | None,
    env: dict[str, str],
) -> None:
    rows = np.random.default_rng(fault).integers(0, 200, (GOOD, WIDTH), dtype=np.uint8)
    poison = np.full((1, WIDTH), fault, np.uint8)
    sender = Sender(raw, f"client{fault}")
    before = sender.add(rows[:3])
    (poison_id,) = sender.add(poison)
    ids = before + sender.add(rows[3:])
    supervisor = start_supervised(server.url, folder, "tests.support.faulty_worker", **env)
    try:
        until(lambda: len(sender.replies()) >= GOOD + 1, 80)
        with Client(server.url) as client:
            # It goes on afterwards; what was answered twice would have been by now.
            assert int(client.submit(MODEL, rows[0]).result(30)) == onnx_models.checksum(rows)[0]
        until(lambda: sender.inbox.look().rows == 0)
        # Whoever lives removes what the ended ones left.
        until(lambda: len(sender.consumers()) <= 1)
    finally:
        code = supervisor.stop(40)
        print(supervisor.text[-6000:])
    assert code == 0

    replies = {reply.task_id: reply for reply in sender.replies()}
    counts = Counter(reply.task_id for reply in sender.replies())
    assert counts == dict.fromkeys([*ids, poison_id], 1)
    bad = replies.pop(poison_id)
    assert type(errors.from_code(bad.error_code, bad.error_message)) is error
    assert {reply.error_code for reply in replies.values()} == {""}
    found = [int(np.frombuffer(replies[i].outputs[0].data, np.int64)[0]) for i in ids]
    assert found == onnx_models.checksum(rows).tolist()

    ends = re.findall(r"cpu ended with (-?\d+); starting it again", supervisor.text)
    # Once among the others, once alone.
    assert ends == ([] if exit_code is None else [str(exit_code)] * 2)
    state = sender.inbox.look()
    assert (state.rows, state.bytes, state.claimed, state.workers) == (0, 0, 0, 0)
    assert sender.consumers() == set()
    for stream in sender.inbox.keys.streams:
        assert raw.xlen(stream) == 0
        assert raw.xpending(stream, keys.GROUP)["pending"] == 0
    if exit_code is not None:
        assert poison_id in str(bad.error_message)
