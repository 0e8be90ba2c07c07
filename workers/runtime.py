"""What one worker process holds from start to stop: its models, heartbeat and turns."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from producer.connection import connect, named_errors
from producer.errors import ConfigError
from producer.link import Link
from workers.engines import make_engine
from workers.files import RowFiles
from workers.metrics import Counters
from workers.models import ModelConfig
from workers.presence import Presence
from workers.ranges import Ranges, import_nvtx
from workers.served import Served
from workers.settings import WorkerSettings
from workers.tracing import TracingOwner
from workers.watchdog import FreezeGuard, Watchdog

log = logging.getLogger("trtq.runtime")


class Runtime:
    """The models of one worker process.

    `on_fatal(reason)` is called when a thread of it died or hangs; `freeze_guard` ends the process
    when not even that can be. `clock` gives ms and never goes back.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        node_name: str,
        configs: Iterable[ModelConfig],
        on_fatal: Callable[[str], None],
        others_wait: Callable[[], bool],
        clock: Callable[[], float] = lambda: time.monotonic() * 1000,
        freeze_guard: FreezeGuard | None = None,
    ) -> None:
        self._settings = settings
        self._configs = list(configs)
        self._on_fatal = on_fatal
        self._others_wait = others_wait
        self._clock = clock
        self._freeze_guard = freeze_guard or FreezeGuard(None)
        # The same node started again is another consumer: what the old one held runs out.
        self.consumer = f"{node_name}.{secrets.token_hex(3)}"
        self._node_name = node_name
        self._models: dict[str, Served] = {}
        self._tracing = TracingOwner(on=settings.tracing, node=node_name)
        self._stopping = threading.Event()
        self._turn = threading.Lock()
        self._presence: Presence | None = None
        self._watchdog: Watchdog | None = None
        self._hung = False
        self._turned_ms: float | None = None

    def start(self) -> None:
        """Connects, loads and warms every model, then publishes them.

        Raises RedisUnavailable, ConfigError and its children, EngineFailed.
        """
        settings = self._settings
        nvtx = import_nvtx() if settings.nvtx else None
        self._tracing.start()
        self._redis = connect(settings.redis_url)
        link = Link(self._redis)
        self._files = RowFiles(settings.bulk_folders)
        with named_errors(settings.redis_url):
            self._redis.ping()
            # All of them first: a hook that cannot be had is known before a model is read.
            modules = settings.allowed_hook_modules
            ranges = [Ranges(config.name, nvtx) for config in self._configs]
            engines = [
                make_engine(config, hook_modules=modules, ranges=shown)
                for config, shown in zip(self._configs, ranges, strict=True)
            ]
            for config, engine, shown in zip(self._configs, engines, ranges, strict=True):
                served = Served(
                    config,
                    engine,
                    link,
                    self.consumer,
                    settings,
                    self._files,
                    self._clock,
                    self._on_fatal,
                    shown,
                    self._tracing.of(config.name),
                )
                self._models[config.name] = served
                served.start()
            self._watchdog = Watchdog(
                list(self._models.values()),
                self._clock,
                self._on_fatal,
                self._on_fatal,
                self._freeze_guard,
            )
            self._watchdog.start()
            facts: dict[str, Any] = {
                "node": self._node_name,
                "device": settings.device,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": round(time.time(), 3),
            }
            if settings.metrics_port:
                facts["metrics_url"] = settings.metrics_url(facts["host"])
            presence = Presence(
                self._redis,
                self.consumer,
                facts,
                list(self._models.values()),
                settings.lease_ms,
                settings.heartbeat_s,
                self._on_fatal,
            )
            presence.start()
            self._presence = presence

    def turn(self, model: str, reason: str) -> dict[str, Any]:
        """One turn on `model`; returns its summary. One at a time in a process."""
        served = self._models.get(model)
        if served is None:
            raise ConfigError(
                f"this worker does not serve model {model!r} but {sorted(self._models)}"
            )
        with self._turn:
            if self._stopping.is_set():
                # A bell that came while the worker stops: another worker's watch rings again.
                return _summary(model, Counters(), 0.0)
            before, started_ms = served.counters.copy(), self._clock()
            shared = len(self._models) > 1
            served.turn(self._stopping.is_set, self._others_wait, shared=shared)
            self._turned_ms = self._clock()
            summary = _summary(
                model, served.counters.since(before), (self._clock() - started_ms) / 1000
            )
        log.info(
            "turn on %r: %d tasks in %d batches, %.3f s",
            *(summary[name] for name in ("model", "tasks", "batches", "seconds")),
            extra=summary,
        )
        return summary

    def request_stop(self) -> None:
        """Turns end soon: nothing more is claimed, what runs is finished and answered."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """True once a stop was asked for."""
        return self._stopping.is_set()

    @property
    def models(self) -> list[Served]:
        """The models that are loaded and warm."""
        return [served for served in list(self._models.values()) if hasattr(served, "executor")]

    @property
    def presence(self) -> Presence | None:
        """The heartbeat; None until every model is warm."""
        return self._presence

    @property
    def watchdog(self) -> Watchdog | None:
        """Who looks for runs that hang; None until every model is warm."""
        return self._watchdog

    @property
    def hung(self) -> bool:
        """True once `close` had to leave a slot's thread behind that still uses its engine."""
        return self._hung

    @property
    def turn_age_s(self) -> float | None:
        """Seconds since the last turn ended, 0 while one runs, None before the first."""
        if self._turn.locked():
            return 0.0
        return None if self._turned_ms is None else (self._clock() - self._turned_ms) / 1000

    def ping(self) -> None:
        """Asks Redis for a sign of life; raises redis-py's errors."""
        self._redis.ping()

    def close(self) -> bool:
        """Ends the turn, stops and frees everything; False if the turn outlived its grace."""
        self.request_stop()
        drained = self._turn.acquire(timeout=self._settings.drain_grace_s)
        if self._presence is not None:
            self._presence.close()
        if self._watchdog is not None:
            self._watchdog.close()
        for served in self._models.values():
            self._hung |= not served.close()
        self._models = {}
        self._tracing.close()
        if hasattr(self, "_files"):
            self._files.close()
            self._redis.close()
        if drained:
            # Whoever waits for it, a bell that came late, must not hold up the pool's end.
            self._turn.release()
        return drained


def _summary(model: str, counts: Counters, seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        "tasks": counts.tasks,
        "rows": counts.rows,
        "batches": counts.batches,
        "mean_batch": round(counts.rows / counts.batches, 1) if counts.batches else 0.0,
        "failed": counts.failed,
        "expired": counts.expired,
        "cancelled": counts.cancelled,
        "reclaimed": counts.reclaimed,
        "released": counts.released,
        "seconds": round(seconds, 3),
    }
