"""Empties a model's queue and tells the senders."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import redis

from producer import keys
from producer.dead import DeadLetters
from producer.errors import Cancelled, WireError
from producer.inbox import REPLY_TTL_S, Inbox
from producer.keyed import free_keys
from producer.link import Link
from producer.quote import shown_name
from producer.task import Reply, client_of
from producer.wire import decode_task, encode_reply, sender_of

log = logging.getLogger("trtq.purge")


def purge(connection: redis.Redis, model: str) -> int:
    """Takes every task of `model` that no worker holds, and its dead letters; returns how many
    tasks that were, without the letters.

    Their tickets end with Cancelled. Raises InvalidInput for a name that is none, redis-py's
    errors.
    """
    with closing(DeadLetters(connection, model)) as letters:
        letters.drop(list(letters.letters()))
    connection.delete(keys.old_dead(model))
    with closing(Link(connection)) as link:
        return _purge_queue(link, model)


def _purge_queue(link: Link, model: str) -> int:
    inbox = Inbox(link, model)
    before = inbox.look()
    left = before.high + before.normal + before.low
    removed = 0
    # At most what was there at the start: busy senders must not keep this going for ever.
    while removed < left:
        frames, keyed = inbox.purge()
        if not frames:
            break
        removed += len(frames)
        _tell(link, model, frames)
        free_keys(link, model, keyed)
    return removed


def _tell(link: Link, model: str, frames: list[bytes]) -> None:
    replies: dict[str, bytearray] = {}
    stored: dict[str, tuple[bytes, int]] = {}
    for frame in frames:
        task_id = sender_of(frame)
        name = "without a readable id" if task_id is None else shown_name(task_id)
        log.info("task %s of model %r is purged [operator]", name, model)
        if task_id is None:
            continue
        message = f"task {task_id}: the queue of model {model!r} was purged"
        reply = encode_reply(Reply(task_id, error_code=Cancelled.code, error_message=message))
        replies.setdefault(client_of(task_id), bytearray()).extend(reply)
        store_s = _store_s(frame)
        if store_s:
            stored[keys.result(task_id)] = (reply, store_s)
    # One script, which a Redis at maxmemory runs too.
    args: list[Any] = [REPLY_TTL_S, len(replies), *(bytes(joined) for joined in replies.values())]
    for reply, store_s in stored.values():
        args += (reply, store_s)
    script_keys = [keys.model_keys(model).turns, *map(keys.reply, replies), *stored]
    link.script("tell", script_keys, args)


def _store_s(frame: bytes) -> int:
    try:
        return decode_task(frame).store_s
    except WireError:
        return 0  # its sender is told; what else it asked for cannot be read
