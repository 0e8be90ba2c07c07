"""What is put into Celery's queues and is no call of a task: dropped, the worker goes on."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st
from kombu.message import Message

from producer import Client
from producer.bell import bell_message
from producer.embedded import EmbeddedRedis
from producer.errors import CorruptMessage
from producer.keys import INFER_QUEUE, INFER_TASK, SERVE_TASK, bell_queue
from tests.support import models as onnx_models
from tests.support.processes import start_worker, until
from workers.messages import accepted_tasks, check_message

WIDTH = 16
QUEUE = bell_queue("checksum")


def bell() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(bell_message("checksum", "work"))
    return made


def encoded(body: Any) -> str:
    return base64.b64encode(json.dumps(body).encode()).decode()


def changed(**fields: Any) -> bytes:
    return json.dumps({**bell(), **fields}).encode()


def with_headers(**headers: Any) -> bytes:
    return changed(headers={**bell()["headers"], **headers})


def with_properties(**properties: Any) -> bytes:
    return changed(properties={**bell()["properties"], **properties})


GARBAGE = {
    "text": b"x",
    "null": b"null",
    "number": b"7",
    "list": b"[]",
    "empty object": b"{}",
    "not UTF-8": b"\xff\xfe\x00",
    "deeply nested": b"[" * 100_000,
    "kombu's typed value": b'{"__type__": "datetime", "__value__": 5}',
    "half a message": bell_message("checksum", "work")[:200],
    "no properties": changed(properties=None),
    "no delivery info": with_properties(delivery_info=None),
    "an object as delivery tag": with_properties(delivery_tag={"a": 1}),
    "no delivery tag": with_properties(delivery_tag=None),
    "unknown encoding": with_properties(body_encoding="rot13"),
    "bad base64": changed(body="x"),
    "body that is no JSON": changed(body=base64.b64encode(b"\xff{").decode()),
    "body that is no text": changed(body=[1, 2]),
    "number as body": changed(body=encoded(5)),
    "object as body": changed(body=encoded({})),
    "short body": changed(body=encoded([["checksum"]])),
    "arguments that are none": changed(body=encoded([5, {}, {}])),
    "pickle": changed(**{"content-type": "application/x-python-serialize"}),
    "unknown content type": changed(**{"content-type": 5}),
    "no headers": changed(headers=None),
    "a flag as headers": changed(headers=True),
    "no task": with_headers(task=None),
    "a list as task": with_headers(task=[1]),
    "unknown task": with_headers(task="os.system"),
    "Celery's own task": with_headers(task="celery.backend_cleanup"),
    "the other queue's task": with_headers(task=INFER_TASK),
    "no id": with_headers(id=None),
    "wrong eta": with_headers(eta=5),
    "an eta": with_headers(eta="2999-01-01T00:00:00"),
    "wrong expiry": with_headers(expires="yesterday"),
    "wrong time limits": with_headers(timelimit=[1]),
    "a call of another task afterwards": changed(
        body=encoded([["checksum", "work"], {}, {"chain": [{"task": "celery.map", "args": []}]}])
    ),
    "too many arguments": changed(body=encoded([[1, 2, 3, 4], {}, {}])),
    "no model": changed(body=encoded([[None], {}, {}])),
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    """A Redis of these tests' own."""
    with EmbeddedRedis() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checksum model."""
    made = tmp_path_factory.mktemp("models")
    onnx_models.checksum_model(made / "checksum.onnx", WIDTH)
    onnx_models.write_config(made, "checksum", max_batch=8)
    return made


def test_a_worker_drops_what_is_no_bell_and_goes_on(server: EmbeddedRedis, folder: Path) -> None:
    worker = start_worker(server.url, folder)
    with redis.Redis.from_url(server.url) as connection, Client(server.url) as client:
        for message in GARBAGE.values():
            connection.lpush(QUEUE, message)
        until(lambda: not connection.llen(QUEUE))
        results = list(client.map("checksum", np.ones((20, WIDTH), np.uint8)))
        assert len(results) == 20
        # Each message that is not given back would count as one that this worker is busy with.
        until(lambda: not connection.hlen("unacked"))
    assert worker.process.poll() is None, worker.text
    # Two reach the task itself, which names what is wrong with its arguments; one has expired.
    assert worker.text.count("from Celery's queues") >= len(GARBAGE) - 3, worker.text
    assert worker.stop() == 0


def test_the_process_of_trtq_infer_drops_what_is_no_call(
    server: EmbeddedRedis, folder: Path
) -> None:
    serving = start_worker(server.url, folder)
    calls = start_worker(server.url, folder, name="infer", queues=INFER_QUEUE, concurrency=2)
    app = Celery("caller", broker=server.url, backend=server.url)
    with redis.Redis.from_url(server.url) as connection:
        for message in GARBAGE.values():
            connection.lpush(INFER_QUEUE, message)
        until(lambda: not connection.llen(INFER_QUEUE))
        pending = app.send_task(
            INFER_TASK, args=["checksum", [1] * WIDTH], queue=INFER_QUEUE, countdown=0.1
        )
        assert isinstance(pending.get(timeout=20), list | int | float)
    app.close()
    assert calls.process.poll() is None, calls.text
    assert calls.stop() == 0
    assert serving.stop() == 0


def as_message(raw: dict[str, Any]) -> Message:
    return Message(
        body=base64.b64decode(raw["body"]),
        content_type=raw["content-type"],
        content_encoding=raw["content-encoding"],
        headers=raw["headers"],
        accept=["application/json"],
    )


def test_a_bell_is_a_call() -> None:
    check_message(as_message(bell()), accepted_tasks([QUEUE]))


def test_a_queue_says_which_task_may_be_called() -> None:
    assert accepted_tasks([INFER_QUEUE]) == {INFER_TASK}
    assert accepted_tasks([QUEUE]) == {SERVE_TASK}
    assert accepted_tasks([QUEUE, INFER_QUEUE]) == {SERVE_TASK, INFER_TASK}
    with pytest.raises(CorruptMessage, match=r"this worker runs trtq\.infer"):
        check_message(as_message(bell()), accepted_tasks([INFER_QUEUE]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(
    headers=st.none() | st.dictionaries(st.sampled_from(sorted(bell()["headers"])), JSON),
    body=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()),
    content_type=st.sampled_from(("application/json", "application/x-python-serialize", "")),
)
def test_whatever_a_message_holds_it_is_a_call_or_refused_by_name(
    headers: Any, body: bytes, content_type: str
) -> None:
    message = Message(
        body=body,
        content_type=content_type,
        content_encoding="utf-8",
        headers=headers,
        accept=["application/json"],
    )
    with suppress(CorruptMessage):
        check_message(message, {SERVE_TASK})
        assert message.headers["task"] == SERVE_TASK
