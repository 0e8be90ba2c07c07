"""Settings from the environment: numbers that would break a worker or a client are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from producer.config import ProducerSettings
from workers.settings import WorkerSettings

WORKER = """
    LEASE_MS=499 LEASE_MS=1e30 LEASE_MS=86400001 LINGER_MS=-1 LINGER_MS=1e9 TURN_BUDGET_S=0
    TURN_BUDGET_S=inf MAX_DELIVERIES=0 MAX_DELIVERIES=1e9 DRAIN_GRACE_S=0 DRAIN_GRACE_S=inf
    DRAIN_GRACE_S=1e300 DRAIN_GRACE_S=nan HEARTBEAT_S=0 HEARTBEAT_S=10.5 HEARTBEAT_S=inf
    HEARTBEAT_S=1e-300 DEAD_MAX_TASKS=0 DEAD_MAX_TASKS=1e30 DEAD_MAX_BYTES=0 DEAD_MAX_BYTES=1e30
    DEAD_TTL_S=0 DEAD_TTL_S=1e25 METRICS_PORT=65536
"""
PRODUCER = """
    DEFAULT_DEADLINE_S=0 DEFAULT_DEADLINE_S=inf DEFAULT_TIMEOUT_S=-1 DEFAULT_TIMEOUT_S=nan
    CLIENT_MAX_UNSENT=0 CLIENT_MAX_UNSENT=1e30 STORE_S=0 STORE_S=1e25 KEY_WINDOW_S=0
    KEY_WINDOW_S=inf SPEC_TTL_S=-1 SPEC_TTL_S=nan CONNECT_TIMEOUT_S=0 CONNECT_TIMEOUT_S=inf
"""


@pytest.mark.parametrize(
    ("settings", "given"),
    [(WorkerSettings, given) for given in WORKER.split()]
    + [(ProducerSettings, given) for given in PRODUCER.split()],
)
def test_a_number_out_of_bounds_is_refused_by_name(
    settings: type[WorkerSettings | ProducerSettings], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = given.split("=")
    monkeypatch.setenv(f"TRTQ_{name}", value)
    with pytest.raises(ValidationError, match=name.lower()):
        settings()
