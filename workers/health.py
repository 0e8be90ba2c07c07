"""Whether a worker process lives and whether it takes work: pure functions of what it shows."""

from __future__ import annotations

from typing import Any, NamedTuple

import redis

from producer.connection import LINK_ERRORS
from workers.runtime import Runtime

#: A heartbeat thread that did not come round for this long hangs. Calls to Redis end sooner.
HUNG_S = 60.0


class Report(NamedTuple):
    """An answer for a probe: its verdict, and what it rests on."""

    ok: bool
    facts: dict[str, Any]


def liveness(runtime: Runtime | None) -> Report:
    """Ok unless a thread has died or hangs, also while the worker stops for that.

    A process that still loads its models is alive.
    `runtime` is None in a process that serves no models.
    """
    if runtime is None:
        return Report(True, {"state": "no models"})
    presence = runtime.presence
    if presence is None:
        return Report(True, {"state": "stopping" if runtime.stopping else "starting"})
    watchdog = runtime.watchdog
    threads: dict[str, bool] = {
        "heartbeat": presence.alive,
        "watchdog": watchdog is not None and watchdog.alive,
    }
    for served in runtime.models:
        name = served.config.name
        threads[f"slots of {name}"] = served.executor.alive
        threads[f"replies of {name}"] = served.replier.alive
    facts: dict[str, Any] = {
        "state": "stopping" if runtime.stopping else "running",
        "threads": threads,
        "heartbeat_age_s": round(presence.beat_age_s, 3),
        "turn_age_s": _rounded(runtime.turn_age_s),
        "hung": [served.config.name for served in runtime.models if served.executor.hung],
    }
    if facts["hung"]:
        return Report(False, facts)
    if runtime.stopping:
        # Threads end one after the other then; the stop has a deadline of its own.
        return Report(True, facts)
    return Report(all(threads.values()) and presence.loop_age_s < HUNG_S, facts)


def readiness(runtime: Runtime | None) -> Report:
    """Ok if the models are warm, Redis answers, and no stop was asked for."""
    alive = liveness(runtime)
    facts = dict(alive.facts)
    if runtime is None:
        return Report(True, facts)
    warm = runtime.presence is not None
    reachable = False
    if warm:
        try:
            runtime.ping()
            reachable = True
        except (*LINK_ERRORS, redis.exceptions.RedisError) as failure:
            facts["redis_error"] = str(failure)
    facts |= {"warm": warm, "redis": reachable}
    return Report(alive.ok and warm and reachable and not runtime.stopping, facts)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
