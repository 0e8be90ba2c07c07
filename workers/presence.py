"""A worker's heartbeat, and its watch over work that nobody covers. One thread per process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import redis

from producer import keys
from producer.connection import LINK_ERRORS, PASSING_ERRORS
from producer.errors import ModelConflict
from producer.limits import RateLimit
from producer.link import Link
from producer.spec import ModelSpec
from workers.inbox import WorkerInbox
from workers.metrics import Counters

log = logging.getLogger("trtq.presence")

#: A worker counts as alive for so long after a beat, and for so many beats that fail to come.
_LEAST_ALIVE_MS = 5000
_ALIVE_BEATS = 3
_SWEEP_S = 10.0


class ServedModel(Protocol):
    """What the heartbeat asks of a loaded model."""

    spec: ModelSpec
    rate_limit: RateLimit | None
    inbox: WorkerInbox
    counters: Counters


class Presence:
    """Publishes specs and a heartbeat; rings where work is a second old with nobody on it."""

    def __init__(
        self,
        connection: redis.Redis,
        consumer: str,
        facts: dict[str, Any],
        models: Sequence[ServedModel],
        lease_ms: int,
        interval_s: float,
        on_death: Callable[[str], None],
    ) -> None:
        self._redis = connection
        self._link = Link(connection)
        self._consumer = consumer
        self._facts = facts
        self._models = models
        self._lease_ms = lease_ms
        self._interval_s = interval_s
        self._alive_ms = max(_LEAST_ALIVE_MS, int(_ALIVE_BEATS * interval_s * 1000))
        self._on_death = on_death
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._before = Counters()
        self._before_s = 0.0
        self._looped_s = 0.0
        self._swept_s = 0.0

    def start(self) -> None:
        """Publishes once, then starts the thread.

        Raises ModelConflict if a live worker serves another model under the same name.
        """
        for model in self._models:
            self._check_conflict(model)
        self._before_s = time.monotonic()
        self._beat()
        self._thread = threading.Thread(target=self._guarded, name="trtq-presence", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while the thread lives."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def beat_age_s(self) -> float:
        """Seconds since the last beat that Redis took; counted from the clock's zero before."""
        return time.monotonic() - self._before_s

    @property
    def loop_age_s(self) -> float:
        """Seconds since the thread last came round, with or without Redis."""
        return time.monotonic() - max(self._looped_s, self._before_s)

    def close(self) -> None:
        """Stops the thread and takes this worker off the lists."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None
        try:
            self._redis.delete(keys.worker(self._consumer))
            for model in self._models:
                model.inbox.absent(self._consumer)
        except LINK_ERRORS as failure:
            log.warning("the worker's presence will expire by itself: %s", failure)

    def _check_conflict(self, model: ServedModel) -> None:
        published = self._redis.hget(keys.MODELS, model.spec.name)
        limits = {k.decode(): v.decode() for k, v in self._limits(model).items()}
        ours = model.rate_limit.published() if model.rate_limit else {}
        if published is None or (published == _published(model.spec) and limits == ours):
            return
        if model.inbox.look().workers:
            raise ModelConflict(
                f"model {model.spec.name!r}: a live worker serves another one under that name "
                "(other inputs, outputs or limits); give this one another name, or stop the "
                "workers of the old one first"
            )

    def _limits(self, model: ServedModel) -> dict[bytes, bytes]:
        found: Any = self._redis.hgetall(keys.model_keys(model.spec.name).limits)
        return dict(found)

    def _guarded(self) -> None:
        try:
            while not self._stop.wait(self._interval_s):
                self._looped_s = time.monotonic()
                try:
                    self._beat()
                    self._heal()
                    self._sweep()
                except PASSING_ERRORS as failure:
                    log.warning("heartbeat: Redis is away or refuses: %s", failure)
        except BaseException as failure:
            log.exception("the heartbeat died")
            self._on_death(f"the heartbeat died: {failure!r}")
            raise

    def _beat(self) -> None:
        now_s = time.monotonic()
        total = Counters()
        for model in self._models:
            total.add(model.counters)
        seconds = max(1e-9, now_s - self._before_s)
        document = {
            **self._facts,
            "name": self._consumer,
            "models": [model.spec.name for model in self._models],
            **{name: getattr(total, name) for name in Counters.__dataclass_fields__},
            "tasks_per_s": round((total.tasks - self._before.tasks) / seconds, 1),
            "rows_per_s": round((total.rows - self._before.rows) / seconds, 1),
        }
        args: list[Any] = [self._alive_ms, json.dumps(document)]
        for model in self._models:
            args += (model.spec.name, _published(model.spec))
        turns = keys.model_keys(self._models[0].spec.name).turns
        self._link.script("beat", (keys.worker(self._consumer), keys.MODELS, turns), args)
        for model in self._models:
            model.inbox.attend(self._consumer, self._alive_ms, model.rate_limit)
        self._before, self._before_s = total, now_s

    def _heal(self) -> None:
        for model in self._models:
            if model.inbox.heal(self._lease_ms):
                log.info(
                    "work of model %r had no bell and no turn: rang",
                    model.spec.name,
                    extra={"model": model.spec.name},
                )

    def _sweep(self) -> None:
        """Killed workers leave their consumers in the group; whoever lives removes them."""
        if self._looped_s - self._swept_s < _SWEEP_S:
            return
        self._swept_s = self._looped_s
        for model in self._models:
            removed = model.inbox.sweep(self._lease_ms)
            if removed:
                log.info(
                    "removed %d consumers of dead workers of %r",
                    removed,
                    model.spec.name,
                    extra={"model": model.spec.name},
                )


def _published(spec: ModelSpec) -> bytes:
    return spec.model_dump_json().encode()
