"""Settings of a worker process, from `TRTQ_*` environment variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator

from producer.config import RedisSettings, wrong_setting
from producer.letters import LetterLimits
from producer.spec import MAX_COUNT

_DAY_S = 86_400
_YEAR_S = 365 * _DAY_S
#: A process that ended with this would end so again (os.EX_CONFIG): it is not restarted.
EXIT_CONFIG = 78
#: Environment variable: the file descriptor that ends with the supervisor (see workers/launch.py).
SUPERVISOR_FD = "TRTQ_SUPERVISOR_FD"


class WorkerSettings(RedisSettings):
    """What one worker process needs to know. Lists of folders are separated as PATH is."""

    #: Folders of model configurations.
    models: str = "configs/models"
    #: "cpu", the index of a GPU in bus order, or the UUID of a GPU or MIG device.
    device: str = "cpu"
    #: Folders inside which bulk jobs may read and write; empty refuses bulk jobs.
    bulk_roots: str = ""
    #: Python modules, separated by commas, from which hooks may be imported; each with all that is
    #: inside it. Empty refuses models with hooks.
    hook_modules: str = ""
    #: A task whose worker gave no sign for this long is run by another.
    lease_ms: int = Field(default=10_000, ge=500, le=_DAY_S * 1000)
    #: How long a turn waits on an empty stream before it ends.
    linger_ms: int = Field(default=500, ge=0, le=_DAY_S * 1000)
    #: A turn ends after this long, so that other models get theirs.
    turn_budget_s: float = Field(default=30.0, gt=0, le=_DAY_S)
    #: A task delivered this often without an answer is run alone, once.
    max_deliveries: int = Field(default=3, ge=1, le=1000)
    #: How long a stopping worker may take to finish what it runs.
    drain_grace_s: float = Field(default=30.0, gt=0, le=_DAY_S)
    #: How often a worker says that it lives and looks for work that nobody covers.
    heartbeat_s: float = Field(default=1.0, ge=0.01, le=10)
    #: Dead letters kept for each model: how many, bytes of them all, and for how long after the
    #: last one.
    dead_max_tasks: int = Field(default=LetterLimits().tasks, ge=1, le=MAX_COUNT)
    dead_max_bytes: int = Field(default=LetterLimits().bytes, ge=1, le=MAX_COUNT)
    dead_ttl_s: int = Field(default=LetterLimits().ttl_s, ge=1, le=10 * _YEAR_S)

    #: Show stages as NVTX ranges to a profiler; needs the package nvtx.
    nvtx: bool = False

    #: Make spans of OpenTelemetry for tasks whose clients trace them; needs the extra `tracing`.
    tracing: bool = False

    #: Format of the log: Celery's text, or one JSON object a record.
    log_format: Literal["text", "json"] = "text"

    #: Port of /metrics, /healthz, /readyz and /drain; 0: none. `trtq worker` counts it up.
    metrics_port: int = Field(default=0, ge=0, le=65535)
    #: Address on which that port listens.
    metrics_host: str = "127.0.0.1"

    @field_validator("hook_modules")
    @classmethod
    def _dotted_names(cls, value: str) -> str:
        for name in _names(value):
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"{name!r} is no module name; separate names with commas")
        return value

    def metrics_url(self, host: str) -> str:
        """Where others reach /metrics of this process, whose machine is called `host`."""
        address = self.metrics_host
        if address in ("", "0.0.0.0", "::"):
            address = host
        return f"http://{f'[{address}]' if ':' in address else address}:{self.metrics_port}/metrics"

    @property
    def letter_limits(self) -> LetterLimits:
        """The three `dead_` settings."""
        return LetterLimits(self.dead_max_tasks, self.dead_max_bytes, self.dead_ttl_s)

    @property
    def model_folders(self) -> list[Path]:
        """`models` as paths."""
        return _paths(self.models)

    @property
    def bulk_folders(self) -> list[Path]:
        """`bulk_roots` as paths."""
        return _paths(self.bulk_roots)

    @property
    def allowed_hook_modules(self) -> list[str]:
        """`hook_modules` as names."""
        return _names(self.hook_modules)


def worker_settings() -> WorkerSettings:
    """The environment's settings; raises ConfigError that names a wrong variable."""
    try:
        return WorkerSettings()
    except ValidationError as failure:
        raise wrong_setting(failure) from None


def _names(joined: str) -> list[str]:
    return [name for part in joined.split(",") if (name := part.strip())]


def _paths(joined: str) -> list[Path]:
    return [Path(part) for part in joined.split(os.pathsep) if part]
