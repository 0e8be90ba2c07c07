"""A worker's log as lines of JSON, with TRTQ_LOG_FORMAT=json. Without it Celery's format stays.

Celery sets up its own handlers (level, file, rotation by others); only their formatter is changed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from celery import signals

from producer.keys import SERVE_TASK

JSON = "json"
#: What every record has; all else was given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_NOTHING: Mapping[str, str] = MappingProxyType({})
_fields: ContextVar[Mapping[str, str]] = ContextVar("trtq_log_fields", default=_NOTHING)


@contextmanager
def logged_with(**fields: str) -> Iterator[None]:
    """Adds `fields` to every record that this thread logs while the block runs."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object a record, on one line.

    `time` (UTC, ISO 8601), `level`, `logger`, `message`, then `constant` (the node, its device),
    the fields of `logged_with`, what the call gave as `extra`, and `exception` with a traceback.
    """

    def __init__(self, constant: Mapping[str, str]) -> None:
        super().__init__()
        self._constant = dict(constant)

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        document: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._constant,
        }
        given = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        for name, value in {
            **_fields.get(),
            **_of_celery(given.pop("data", None)),
            **given,
        }.items():
            document.setdefault(name, value)
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            document["stack"] = record.stack_info
        return json.dumps(document, default=str)


def write_json(node: str, device: str) -> None:
    """From now on, whatever loggers Celery sets up write JSON, and Python's warnings do."""
    formatter = JsonFormatter({"node": node, "device": device})
    # Until Celery has set up its own and takes this one away.
    early = logging.StreamHandler()
    early.setFormatter(formatter)
    logging.getLogger().addHandler(early)
    logging.captureWarnings(True)

    def on_setup(logger: logging.Logger | None = None, **_: Any) -> None:
        for handler in logger.handlers if logger is not None else ():
            handler.setFormatter(formatter)

    signals.after_setup_logger.connect(on_setup, weak=False)
    signals.after_setup_task_logger.connect(on_setup, weak=False)


def say(text: str) -> None:
    """One line on stderr, of a process or at a time without Celery's log; in the log's format."""
    if os.environ.get("TRTQ_LOG_FORMAT") == JSON:
        record = logging.makeLogRecord(
            {"name": "trtq.launch", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        )
        text = JsonFormatter({}).format(record)
    print(text, file=sys.stderr, flush=True)


def _of_celery(data: Any) -> dict[str, str]:
    """Celery's own records of a task carry it as `data`: its id is that of the bell, or request."""
    if not isinstance(data, Mapping) or "id" not in data:
        return {}
    is_turn = data.get("name") == SERVE_TASK
    return {"turn_id" if is_turn else "celery_task_id": str(data["id"])}
