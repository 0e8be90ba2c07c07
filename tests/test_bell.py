"""The bell's message beside the one that the installed Celery would send."""

from __future__ import annotations

import base64
import json
from typing import Any

import redis
from celery import Celery

from producer import keys
from producer.bell import ID, bell_message
from producer.inbox import Inbox
from producer.link import Link
from tests.support.specs import SPEC

#: What differs from message to message, or tells who sent it.
_OWN = {"id", "root_id", "correlation_id", "delivery_tag", "reply_to", "origin"}


def plain(message: bytes) -> dict[str, Any]:
    """The message with its body decoded and without what is its own."""
    document: dict[str, Any] = json.loads(message)
    document["body"] = json.loads(base64.b64decode(document["body"]))
    for part in ("headers", "properties"):
        document[part] = {k: v for k, v in document[part].items() if k not in _OWN}
    return document


def keys_of(message: bytes) -> dict[str, set[str]]:
    """The names of all fields."""
    document = json.loads(message)
    return {part: set(document[part]) for part in ("headers", "properties")}


def pop(connection: redis.Redis) -> bytes:
    """The one message in the model's queue."""
    (message,) = connection.lrange(keys.bell_queue("m"), 0, -1)
    assert isinstance(message, bytes)
    return message


def test_it_is_what_celery_sends(connection: redis.Redis, redis_url: str) -> None:
    app = Celery("any", broker=redis_url, set_as_current=False)
    app.conf.task_serializer = "json"
    app.send_task(
        keys.SERVE_TASK,
        args=("m", "work"),
        queue=keys.bell_queue("m"),
        ignore_result=True,
        argsrepr=repr(("m", "work")),
    )
    app.close()
    theirs, ours = pop(connection), bell_message("m", "work")
    assert plain(ours) == plain(theirs)
    assert keys_of(ours) == keys_of(theirs)


def test_redis_rings_with_an_id_of_its_own(connection: redis.Redis) -> None:
    inbox = Inbox(Link(connection), "m")
    rang, _ = inbox.add(SPEC, 1, "c", 1, [(1, b"frame")])
    assert rang
    document = json.loads(pop(connection))
    bell_id = document["headers"]["id"]
    assert bell_id.startswith("bell-")
    assert {document["properties"][k] for k in ("correlation_id", "delivery_tag")} == {bell_id}
    assert connection.zrange(inbox.keys.bells, 0, -1) == [bell_id.encode()]
    assert ID not in json.dumps(document)
