"""The Celery message that tells some worker that a model has work.

A bell carries no task. One that is lost costs a second (a worker's watch rings again), one that
is doubled costs an empty turn. Redis itself puts it into the model's queue, in the same step
that finds it needed, so the message is made here as Celery and kombu would make it.
"""

from __future__ import annotations

import base64
import json

from producer import keys

#: Replaced by the bell's own id when it rings.
ID = "@bell@"


def bell_message(model: str, reason: str) -> bytes:
    """What `send_task(SERVE_TASK, (model, reason))` would put into the model's queue.

    Celery's message protocol 2 inside kombu's virtual transport envelope; a test holds it
    against the installed Celery's own.
    """
    args = [model, reason]
    calls = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    body = json.dumps([args, {}, calls]).encode()
    headers: dict[str, object] = {
        "lang": "py",
        "task": keys.SERVE_TASK,
        "id": ID,
        "shadow": None,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": ID,
        "parent_id": None,
        "argsrepr": repr(tuple(args)),
        "kwargsrepr": "{}",
        "origin": "trtq",
        "ignore_result": True,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }
    properties = {
        "correlation_id": ID,
        "reply_to": "",
        "argsrepr": repr(tuple(args)),
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": keys.bell_queue(model)},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": ID,
    }
    message = {
        "body": base64.b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": properties,
    }
    return json.dumps(message).encode()
