"""Every fault by name, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos import faults_bulk as bulk
from benchmarks.chaos import faults_clients as clients
from benchmarks.chaos import faults_clock as clock
from benchmarks.chaos import faults_engine as engine
from benchmarks.chaos import faults_network as network
from benchmarks.chaos import faults_redis as redis
from benchmarks.chaos import faults_workers as workers

#: Called with a folder of its own and the seconds of load; returns its row of the report.
Fault = Callable[[Path, float], dict[str, Any]]

FAULTS: dict[str, Fault] = {
    "worker-killed": workers.worker_killed,
    "worker-stopped": workers.worker_stopped,
    "worker-paused": workers.worker_paused,
    "redis-killed": redis.redis_killed,
    "redis-forgets": redis.redis_forgets,
    "redis-full": redis.redis_full,
    "link-reset": network.link_reset,
    "link-loses-answers": network.link_loses_answers,
    "link-stalled": network.link_stalled,
    "link-slow": network.link_slow,
    "link-half-open": network.link_half_open,
    "link-partly-half-open": network.link_partly_half_open,
    "client-killed": clients.client_killed,
    "engine-slow": engine.engine_slow,
    "engine-raises": engine.engine_raises,
    "engine-wrong-shape": engine.engine_wrong_shape,
    "engine-segfaults": engine.engine_segfaults,
    "engine-hangs": engine.engine_hangs,
    "clock-stepped": clock.clock_stepped,
    "redis-clock-stepped": clock.redis_clock_stepped,
    "bulk-disk-full": bulk.bulk_disk_full,
    "bulk-twice": bulk.bulk_twice,
}
