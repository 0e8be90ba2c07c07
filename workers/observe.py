"""Puts the worker's HTTP port together, where one is asked for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from producer.errors import ConfigError, MissingExtra
from workers.gpu import GpuReader, gpu_reader
from workers.health import liveness, readiness
from workers.runtime import Runtime
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from workers.endpoint import Endpoint
    from workers.launch import Plan


class Observer:
    """Owner of the HTTP port and the GPU's reader. `runtime()`: None where no models are served."""

    def __init__(self, settings: WorkerSettings, runtime: Callable[[], Runtime | None]) -> None:
        self._settings = settings
        self._runtime = runtime
        self._endpoint: Endpoint | None = None
        self._gpu: GpuReader | None = None

    def start(self) -> None:
        """Serves TRTQ_METRICS_PORT unless it is 0. Raises MissingExtra, Unavailable."""
        settings = self._settings
        if not settings.metrics_port:
            return
        try:
            from workers.collector import WorkerCollector
            from workers.endpoint import Endpoint
        except ImportError as failure:
            raise MissingExtra(
                f"TRTQ_METRICS_PORT needs prometheus-client ({failure}): "
                "pip install 'trtq[metrics]'"
            ) from failure
        self._gpu = gpu_reader(settings.device)
        self._endpoint = Endpoint(
            settings.metrics_host,
            settings.metrics_port,
            WorkerCollector(self._runtime, settings.device, self._gpu),
            lambda: liveness(self._runtime()),
            lambda: readiness(self._runtime()),
            drain=lambda: os.kill(os.getpid(), signal.SIGTERM),
        )
        self._endpoint.start()

    def close(self) -> None:
        """Frees the port."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None


def with_ports(plans: Sequence[Plan], base_port: int) -> list[Plan]:
    """Gives each child a port of its own, counted up from `base_port`; 0 gives none any.

    Raises ConfigError if they do not fit below 65536.
    """
    if not base_port:
        return [plan._replace(env={**plan.env, "TRTQ_METRICS_PORT": "0"}) for plan in plans]
    if base_port + len(plans) - 1 > 65535:
        raise ConfigError(f"--metrics-port {base_port}: {len(plans)} ports from there do not exist")
    return [
        plan._replace(env={**plan.env, "TRTQ_METRICS_PORT": str(base_port + index)})
        for index, plan in enumerate(plans)
    ]
