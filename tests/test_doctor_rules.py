"""The doctor's table of rules and its numbers, on synthetic samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from producer.doctor.measures import Measures, measure, models
from producer.doctor.observation import Observation, ServerState, discover
from producer.doctor.pages import Page, checked_url
from producer.doctor.rules import RULES, Condition, judge, rules_table
from producer.errors import ConfigError
from producer.inbox import QueueState
from producer.status import Status
from tests.support.processes import ROOT

#: A worker under load without a fault: full batches, a busy device, nothing waits long.
HEALTHY = Measures(
    tasks_per_s=9000,
    rows_per_s=9000,
    batches=1400,
    workers=1,
    slots=3,
    max_batch_rows=64,
    max_delay_ms=2,
    failed_share=0,
    waiting_tasks=20,
    waiting_rows=20,
    in_flight_tasks=380,
    in_flight_rows=380,
    mean_batch_rows=63,
    batch_fill_share=0.98,
    batch_variation=0.1,
    padding_share=0.01,
    busy_share=0.99,
    slots_busy_share=0.9,
    queue_wait_ms=4,
    hold_ms=8,
    gather_ms=1,
    hooks_ms=0.5,
    compute_ms=14,
    cycle_ms=19,
    copy_share=0.1,
    execute_concurrency=1.9,
    execute_busy_share=1,
    cpu_cores=0.8,
    pinned_bytes=1 << 24,
    redis_cpu_cores=0.3,
    redis_bytes_per_s=5e7,
    redis_memory_share=0.2,
    client_cpu_cores=0.6,
)
ON_CPU: dict[str, Any] = {
    "copy_share": None,
    "execute_concurrency": None,
    "execute_busy_share": None,
    "pinned_bytes": None,
    "compute_concurrency": 1.0,
}
QUEUED = {"waiting_rows": 500, "waiting_tasks": 500}
QUIET = {"waiting_rows": 0, "waiting_tasks": 0}

#: What makes each rule hold, and a step away from it with which it does not.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no_worker": ({**QUEUED, "workers": 0}, {"workers": 1}),
    "tasks_fail": ({"failed_share": 0.02}, {"failed_share": 0.005}),
    "redis_memory": ({"redis_memory_share": 0.9}, {"redis_memory_share": None}),
    "redis_cpu": ({"redis_cpu_cores": 0.95}, {"redis_cpu_cores": 0.8}),
    "redis_bytes": ({"redis_bytes_per_s": 1.2e9}, {"redis_bytes_per_s": 0.9e9}),
    "client_cpu": (
        {"client_cpu_cores": 0.95, **QUIET, "slots_busy_share": 0.4},
        {"client_cpu_cores": None},
    ),
    "hooks": ({"hooks_ms": 15}, {"slots_busy_share": 0.2}),
    "gather": ({"gather_ms": 15}, {"gather_ms": 13}),
    "pageable_copies": ({"pinned_bytes": 0}, {"copy_share": None}),
    "copies": ({"copy_share": 0.35}, {"copy_share": 0.25}),
    "max_delay": (
        {"hold_ms": 18, "max_delay_ms": 50, "slots_busy_share": 0.5, "batch_fill_share": 0.6},
        {"max_delay_ms": 2},
    ),
    "small_batches": ({"batch_fill_share": 0.3, **QUEUED}, {"waiting_rows": 60}),
    "device_idle": ({"execute_busy_share": 0.6, **QUEUED}, QUIET),
    "worker_idle": ({"busy_share": 0.6, **QUEUED}, {"busy_share": 0.9}),
    "slots_starve": ({**ON_CPU, "compute_concurrency": 3.0}, {"cpu_cores": 2.5}),
    "too_many_slots": ({"slots": 8, "execute_concurrency": 7.5}, {"slots": 6}),
    "padding": ({"padding_share": 0.3}, {"padding_share": 0.15}),
    "batch_sizes_vary": ({"batch_variation": 1.4}, {"batches": 10}),
    "max_batch_above_load": ({**QUIET, "batch_fill_share": 0.1}, {"waiting_tasks": 5}),
    "clients": (
        {**QUIET, "busy_share": 0.3, "in_flight_tasks": 0.8, "in_flight_rows": 0.8},
        {"in_flight_tasks": 0.05},
    ),
    "saturated": ({**QUEUED, "queue_wait_ms": 800}, {"queue_wait_ms": 100}),
}


def held(measures: Measures) -> list[str]:
    """Names of the rules that hold."""
    return [finding.rule for finding in judge(measures)]


def test_a_healthy_worker_has_no_finding() -> None:
    assert held(HEALTHY) == []
    assert held(replace(HEALTHY, **ON_CPU)) == []


def test_light_load_is_no_finding() -> None:
    light = replace(
        HEALTHY, **QUIET, busy_share=0.02, slots_busy_share=0.01, in_flight_tasks=0.05,
        in_flight_rows=0.05, batch_fill_share=0.02, mean_batch_rows=1.2, gather_ms=20,
    )  # fmt: skip
    assert held(light) == []


def test_nothing_measured_is_no_finding() -> None:
    assert held(Measures(tasks_per_s=0, rows_per_s=0, batches=0, workers=0)) == []


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", CASES)
def test_rule_holds_and_does_not_hold(name: str) -> None:
    makes, breaks = CASES[name]
    found = judge(replace(HEALTHY, **makes))
    assert name in [finding.rule for finding in found]
    (finding,) = (one for one in found if one.rule == name)
    assert "None" not in finding.says
    assert finding.advice
    assert name not in held(replace(HEALTHY, **{**makes, **breaks}))


@pytest.mark.parametrize(
    ("rule", "condition"),
    [(rule.name, condition) for rule in RULES for condition in rule.when],
    ids=str,
)
def test_every_condition_counts(rule: str, condition: Condition) -> None:
    makes, _ = CASES[rule]
    assert rule not in held(replace(HEALTHY, **{**makes, condition.measure: None}))


def test_causes_stand_before_effects() -> None:
    both = replace(HEALTHY, **QUEUED, hooks_ms=40, queue_wait_ms=900)
    assert held(both) == ["hooks", "saturated"]


def test_conditions_name_measures() -> None:
    known = set(HEALTHY.as_document())
    for rule in RULES:
        for condition in rule.when:
            assert {condition.measure, condition.of or condition.measure} <= known


def test_the_documented_table_is_the_one_in_use() -> None:
    text = (Path(ROOT) / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert rules_table() in text


def page(at_s: float, values: dict[tuple[str, str], float], url: str = "http://w/metrics") -> Page:
    """`values` by name and labels as `stage=run,le=8`; all of model m but the process' own."""
    samples = {}
    for (name, labels), value in values.items():
        found = dict(part.split("=") for part in labels.split(",") if part)
        if not name.startswith("process_"):
            found["model"] = "m"
        samples[name, tuple(sorted(found.items()))] = value
    return Page(url, at_s, samples)


def counts(scale: float) -> dict[tuple[str, str], float]:
    """A worker's counters after `scale` times 10 batches of 48 rows in 64."""
    stage = "trtq_stage_duration_seconds"
    found: dict[tuple[str, str], float] = {
        ("trtq_slots", ""): 2,
        ("trtq_max_batch_rows", ""): 64,
        ("trtq_max_delay_seconds", ""): 0.002,
        ("trtq_tasks_answered_total", ""): 480 * scale,
        ("trtq_tasks_failed_total", "reason=engine_failed"): 24 * scale,
        ("trtq_tasks_failed_total", "reason=cancelled"): 12 * scale,
        ("trtq_rows_total", ""): 480 * scale,
        ("trtq_padded_rows_total", ""): 160 * scale,
        ("trtq_batches_total", ""): 10 * scale,
        ("trtq_busy_seconds_total", ""): 0.5 * scale,
        ("trtq_queue_wait_seconds_count", ""): 480 * scale,
        ("trtq_queue_wait_seconds_sum", ""): 0.96 * scale,
        ("process_cpu_seconds_total", ""): 0.4 * scale,
        ("trtq_batch_rows_bucket", "le=32.0"): 0,
        ("trtq_batch_rows_bucket", "le=64.0"): 10 * scale,
        ("trtq_batch_rows_bucket", "le=+Inf"): 10 * scale,
    }
    seconds = {"gather": 0.01, "run": 0.5, "scatter": 0.02, "hold": 0.05, "reply": 0.03}
    for name, total in {**seconds, "h2d": 0.1, "execute": 0.2, "d2h": 0.1}.items():
        found[f"{stage}_count", f"stage={name}"] = 10 * scale
        found[f"{stage}_sum", f"stage={name}"] = total * scale
    return found


def state(tasks: int, claimed: int, rows: int) -> QueueState:
    return QueueState(0, tasks, 0, claimed, rows, 0, 0, 1, 0, 1, 0)


def observation(before: list[Page], after: list[Page], **kept: Any) -> Observation:
    servers = (ServerState(0.0, 1.0, 1000, 0, 0), ServerState(2.0, 2.0, 5000, 60, 100))
    queues = kept.get("queues", [{"m": state(100, 40, 200)}, {"m": state(0, 0, 0)}])
    return Observation(before, after, queues, *servers, kept.get("client_cpu_s"), [])


def test_numbers_from_two_samples() -> None:
    seen = observation([page(0.0, counts(1))], [page(2.0, counts(3))], client_cpu_s=1.0)
    assert models(seen) == ["m"]
    measures, stages_ms = measure(seen, "m")
    assert measures.tasks_per_s == 480
    assert measures.mean_batch_rows == 48
    assert measures.batch_fill_share == 0.75
    assert measures.padding_share == 0.25
    assert measures.failed_share == 0.05
    assert measures.batch_variation == 0
    assert measures.busy_share == pytest.approx(0.5)
    assert measures.slots_busy_share == pytest.approx(1.06 / 4)
    assert measures.copy_share == pytest.approx(20 / 53)
    assert (measures.compute_ms, measures.cycle_ms) == (pytest.approx(20), pytest.approx(53))
    assert measures.execute_concurrency == measures.execute_busy_share == pytest.approx(0.2)
    assert measures.pinned_bytes == 0
    assert measures.waiting_tasks == 30
    assert measures.waiting_rows == 60
    assert measures.in_flight_tasks == pytest.approx(480 * (2 + 5 + 53 + 3) / 1000)
    assert measures.cpu_cores == pytest.approx(0.4)
    assert (measures.redis_cpu_cores, measures.redis_bytes_per_s) == (0.5, 2000)
    assert measures.redis_memory_share == 0.6
    assert measures.client_cpu_cores == 0.5
    assert stages_ms["run"] == pytest.approx(10)
    assert list(stages_ms) == [
        *("queue_wait", "hold", "gather", "h2d", "execute", "d2h", "run", "scatter", "reply")
    ]
    assert held(measures)[:2] == ["tasks_fail", "pageable_copies"]


def test_a_worker_that_was_started_again_counts_from_zero() -> None:
    seen = observation([page(0.0, counts(5))], [page(2.0, counts(1))])
    assert measure(seen, "m").measures.tasks_per_s == 240


def test_two_workers_are_summed_and_their_time_too() -> None:
    before = [page(0.0, counts(1), "http://a/metrics"), page(0.0, counts(1), "http://b/metrics")]
    after = [page(2.0, counts(3), "http://a/metrics"), page(2.0, counts(3), "http://b/metrics")]
    measures = measure(observation(before, after), "m").measures
    assert measures.tasks_per_s == 960
    assert measures.slots == 2
    assert measures.busy_share == pytest.approx(0.5)
    assert measures.execute_concurrency == pytest.approx(0.2)


def test_a_queue_without_any_worker_is_judged() -> None:
    queues = [{"m": state(5, 0, 5)._replace(workers=0)}]
    seen = observation([], [], queues=queues)
    assert held(measure(seen, "m").measures)[0] == "no_worker"


def test_batches_of_two_sizes_vary() -> None:
    values = counts(1)
    values["trtq_batch_rows_bucket", "le=32.0"] = 0
    later = {**counts(1), ("trtq_batch_rows_bucket", "le=1.0"): 90.0}
    for bound in ("le=32.0", "le=64.0", "le=+Inf"):
        later["trtq_batch_rows_bucket", bound] = values["trtq_batch_rows_bucket", bound] + 90
    later["trtq_batch_rows_bucket", "le=64.0"] += 10
    later["trtq_batch_rows_bucket", "le=+Inf"] += 10
    measures = measure(observation([page(0.0, values)], [page(2.0, later)]), "m").measures
    assert measures.batch_variation is not None
    assert measures.batch_variation > 2


def test_urls() -> None:
    assert checked_url("127.0.0.1:9464") == "http://127.0.0.1:9464/metrics"
    assert checked_url("http://host:1/m") == "http://host:1/m"
    for wrong in ("ftp://host/x", "http://", "http://host:port/"):
        with pytest.raises(ConfigError, match="metrics URL"):
            checked_url(wrong)


def test_workers_that_publish_no_page_are_named() -> None:
    assert discover(Status({}, [])) == []
    assert discover(Status({}, [{"metrics_url": "http://h:1/metrics"}, {}])) == [
        "http://h:1/metrics"
    ]
    with pytest.raises(ConfigError, match="--metrics-port"):
        discover(Status({}, [{"name": "w"}]))
