"""Every Redis key of trtq. `{model}` is a hash tag: one model's keys share a cluster slot."""

from __future__ import annotations

import re
from typing import NamedTuple

from producer.errors import InvalidInput
from producer.quote import quoted

PRIORITIES = ("high", "normal", "low")
GROUP = "workers"
MODELS = "trtq:models"

#: Celery queue and task names.
SERVE_TASK = "trtq.serve"
INFER_TASK = "trtq.infer"
INFER_QUEUE = "trtq.infer"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class ModelKeys(NamedTuple):
    """The keys of one model: its three streams and their bookkeeping."""

    high: str
    normal: str
    low: str
    bells: str
    turns: str
    workers: str
    load: str
    cancelled: str
    dead_letters: str
    dead_bytes: str
    holders: str
    events: str

    @property
    def streams(self) -> tuple[str, str, str]:
        """The streams, most urgent first."""
        return (self.high, self.normal, self.low)


def is_name(name: str) -> bool:
    """True if `name` can be a model's."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """A model's name as given, or InvalidInput: it becomes part of keys and queue names."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"model name {quoted(name)}: use 1 to 100 letters, digits, '.', '_' or '-', "
            "starting with a letter or digit"
        )
    return name


def check_client_name(name: str) -> str:
    """A client's name as given, or InvalidInput.

    It holds no dot: in a client's id one follows the name, so that the access rules of `alice`
    do not fit a client named `alice.b`.
    """
    if not isinstance(name, str) or not _CLIENT_NAME.fullmatch(name):
        raise InvalidInput(
            f"client name {name!r}: use 1 to 64 letters, digits, '_' or '-', starting with a "
            "letter or digit"
        )
    return name


def model_keys(model: str) -> ModelKeys:
    """All keys of `model`; raises InvalidInput for a name that cannot be part of a key."""
    base = f"trtq:{{{check_name(model)}}}"
    return ModelKeys(
        *(f"{base}:in:{priority}" for priority in PRIORITIES),
        *(f"{base}:{part}" for part in ModelKeys._fields[len(PRIORITIES) :]),
    )


def old_dead(model: str) -> str:
    """A list that earlier releases kept; `trtq purge` removes it."""
    return f"trtq:{{{model}}}:dead"


def seen(model: str, priority: str, client: str) -> str:
    """The last flush of `client` that a stream took, so that a retry adds nothing twice."""
    return f"trtq:{{{model}}}:seen:{priority}:{client}"


def reply(client: str) -> str:
    """The client's own list of replies."""
    return f"trtq:reply:{client}"


def result(task_id: str) -> str:
    """A stored result."""
    return f"trtq:result:{task_id}"


def worker(name: str) -> str:
    """A worker's presence: a JSON document that expires unless its heartbeat goes on."""
    return f"trtq:worker:{name}"


def bell_queue(model: str) -> str:
    """The Celery queue in which the model's bells travel."""
    return f"trtq.{model}"
