"""What counts as a finding: a table of rules with their thresholds, and the judge that reads it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from producer.doctor.measures import Measures

_COMPARE = {">": operator.gt, "<": operator.lt}


class Condition(NamedTuple):
    """`measure` compared with `limit`, or with `limit` times the measure named in `of`.

    Not met where a measure is None: what was not measured is not judged.
    """

    measure: str
    comparison: Literal["<", ">"]
    limit: float
    of: str = ""

    def met(self, values: dict[str, float | None]) -> bool:
        """True if it holds for `values`."""
        value = values[self.measure]
        base = values[self.of] if self.of else 1.0
        if value is None or base is None:
            return False
        return bool(_COMPARE[self.comparison](value, self.limit * base))

    def __str__(self) -> str:
        times = f" x {self.of}" if self.of else ""
        return f"{self.measure} {self.comparison} {self.limit:g}{times}"


class Rule(NamedTuple):
    """A finding where all conditions hold. `says` and `advice` may name measures in braces."""

    name: str
    when: tuple[Condition, ...]
    says: str
    advice: str


class Finding(NamedTuple):
    """A rule that holds, in words."""

    rule: str
    says: str
    advice: str


#: Shared by rules of what costs throughput: it does where slots are in use.
_LOADED = Condition("slots_busy_share", ">", 0.5)
#: More than a batch stands in the queue while a worker could hold it.
_QUEUED = Condition("waiting_rows", ">", 1.0, "max_batch_rows")
_NOTHING_WAITS = Condition("waiting_tasks", "<", 1.0)

#: In this order: the first that holds is called the bottleneck, as causes stand before effects.
RULES: tuple[Rule, ...] = (
    Rule(
        "no_worker",
        (Condition("waiting_tasks", ">", 0.5), Condition("workers", "<", 1)),
        "{waiting_tasks:,.0f} tasks wait and no live worker serves the model",
        "start a worker for it (trtq worker), or trtq purge the queue",
    ),
    Rule(
        "tasks_fail",
        (Condition("failed_share", ">", 0.01),),
        "{failed_share:.1%} of the tasks end with an error",
        "see trtq_tasks_failed_total by reason and the workers' log; a batch with a task that "
        "fails runs again task by task",
    ),
    Rule(
        "redis_memory",
        (Condition("redis_memory_share", ">", 0.85),),
        "Redis uses {redis_memory_share:.0%} of its maxmemory; at its limit it refuses tasks",
        "give Redis more maxmemory or lower queue_max_bytes; send large inputs as a bulk job, "
        "which goes past Redis",
    ),
    Rule(
        "redis_cpu",
        (Condition("redis_cpu_cores", ">", 0.85),),
        "Redis' one thread uses {redis_cpu_cores:.2f} of a core",
        "send more rows in a task, so that there are fewer messages; then give each group of "
        "models a Redis of its own",
    ),
    Rule(
        "redis_bytes",
        (Condition("redis_bytes_per_s", ">", 1e9),),
        "Redis moves {redis_bytes_per_s:,.0f} bytes/s, about what one server or a 10 Gbit/s link "
        "can",
        "send smaller dtypes (uint8 instead of float32, with build.prepare or a preprocess hook), "
        "or run bulk jobs, whose rows go past Redis",
    ),
    Rule(
        "client_cpu",
        (
            Condition("client_cpu_cores", ">", 0.85),
            _NOTHING_WAITS,
            Condition("slots_busy_share", "<", 0.7),
        ),
        "the load's own process uses {client_cpu_cores:.2f} of a core while workers wait for it: "
        "the client is the limit",
        "send more rows in a task (--rows), or submit from several processes",
    ),
    Rule(
        "hooks",
        (Condition("hooks_ms", ">", 1.0, "compute_ms"), _LOADED),
        "preprocess and postprocess take {hooks_ms:.2f} ms a batch, the model {compute_ms:.2f} ms",
        "vectorise the hooks over the batch; images on a GPU: build.prepare; then more slots, "
        "whose hooks overlap",
    ),
    Rule(
        "gather",
        (Condition("gather_ms", ">", 1.0, "compute_ms"), _LOADED),
        "putting a batch together takes {gather_ms:.2f} ms, the model {compute_ms:.2f} ms",
        "send more rows in a task (each costs the same handling), or smaller dtypes; then more "
        "slots, which gather while another computes",
    ),
    Rule(
        "pageable_copies",
        (Condition("copy_share", ">", 0.05), Condition("pinned_bytes", "<", 1.0)),
        "batches are copied to the device from memory that is not pinned",
        "raise TRTQ_PINNED_LIMIT_BYTES; an engine of your own must report pinned_bytes",
    ),
    Rule(
        "copies",
        (Condition("copy_share", ">", 0.30), _LOADED),
        "copies to and from the device are {copy_share:.0%} of a batch's time in its slot",
        "send smaller dtypes and convert on the device (build.prepare), return less; more slots "
        "overlap copies with computing",
    ),
    Rule(
        "max_delay",
        (
            Condition("hold_ms", ">", 0.5, "cycle_ms"),
            Condition("max_delay_ms", ">", 0.5, "cycle_ms"),
            Condition("slots", ">", 1.5),
            Condition("slots_busy_share", "<", 0.7),
            Condition("busy_share", ">", 0.5),
            Condition("batch_fill_share", "<", 0.9),
        ),
        "tasks wait {hold_ms:.1f} ms in the worker for fuller batches while slots are free "
        "(a batch takes {cycle_ms:.1f} ms, max_delay_ms is {max_delay_ms:g})",
        "lower max_delay_ms below half of a batch's time",
    ),
    Rule(
        "small_batches",
        (Condition("batch_fill_share", "<", 0.5), _QUEUED),
        "batches hold {mean_batch_rows:.1f} of {max_batch_rows:.0f} rows although "
        "{waiting_rows:,.0f} rows wait",
        "only tasks of equal shapes share a batch, and none is split: pad inputs to few shapes, "
        "and keep rows of a task well below max_batch",
    ),
    Rule(
        "device_idle",
        (Condition("execute_busy_share", "<", 0.8), _QUEUED),
        "the device executes {execute_busy_share:.0%} of the time while {waiting_rows:,.0f} rows "
        "wait",
        "add a slot; if the host's stages (gather, scatter, hooks, reply) are the long bars, "
        "send more rows in a task, or run a second worker process on the device",
    ),
    Rule(
        "worker_idle",
        (Condition("busy_share", "<", 0.8), _QUEUED, Condition("workers", ">", 0.5)),
        "workers run batches {busy_share:.0%} of the time while {waiting_rows:,.0f} rows wait",
        "look at the worker's processor: other models' turns, too few cores, or a slow link to "
        "Redis keep it from claiming",
    ),
    Rule(
        "slots_starve",
        (
            Condition("slots", ">", 1.5),
            Condition("slots_busy_share", ">", 0.7),
            Condition("compute_concurrency", ">", 1.5, "cpu_cores"),
        ),
        "{compute_concurrency:.1f} batches compute at once on {cpu_cores:.1f} cores: slots wait "
        "for each other and each batch takes longer",
        "lower slots (or threads) to what the cores can run at once, or give the worker more cores",
    ),
    Rule(
        "too_many_slots",
        (Condition("slots", ">", 6.5), Condition("execute_concurrency", ">", 6.0)),
        "{execute_concurrency:.1f} batches are on the device at once: each waits for the others "
        "and takes longer, with the same throughput",
        "lower slots to 6 and compare rows/s",
    ),
    Rule(
        "padding",
        (Condition("padding_share", ">", 0.20), _LOADED),
        "{padding_share:.0%} of the computed rows only fill batches up",
        "raise max_delay_ms or the clients' window so that batches fill by themselves, or set "
        "max_batch to a size that comes often",
    ),
    Rule(
        "batch_sizes_vary",
        (
            Condition("batch_variation", ">", 1.0),
            Condition("batches", ">", 50),
            _LOADED,
        ),
        "batch sizes vary with {batch_variation:.1f} times their mean of {mean_batch_rows:.1f}",
        "raise max_delay_ms a little, so that small batches wait for company, and keep rows a "
        "task even",
    ),
    Rule(
        "max_batch_above_load",
        (
            Condition("batch_fill_share", "<", 0.25),
            Condition("slots_busy_share", ">", 0.7),
            _NOTHING_WAITS,
        ),
        "batches hold {mean_batch_rows:.1f} of {max_batch_rows:.0f} rows: clients keep only "
        "{in_flight_rows:,.0f} rows in flight, and the slots are busy with that",
        "have clients keep more in flight (map's window, more of them); if they cannot, lower "
        "max_batch, which frees memory",
    ),
    Rule(
        "clients",
        (
            Condition("busy_share", "<", 0.8),
            _NOTHING_WAITS,
            Condition("in_flight_tasks", ">", 0.3),
            Condition("in_flight_rows", "<", 1.0, "max_batch_rows"),
        ),
        "workers are idle {idle_share:.0%} of the time and nothing waits: clients keep about "
        "{in_flight_tasks:.1f} tasks in flight",
        "if clients wait for answers before they go on, keep more tasks in flight (map's window, "
        "submit before result) or use more clients; if this is all the load there is, nothing",
    ),
    Rule(
        "saturated",
        (
            Condition("queue_wait_ms", ">", 10.0, "cycle_ms"),
            Condition("slots_busy_share", ">", 0.8),
            _QUEUED,
        ),
        "tasks wait {queue_wait_ms:,.0f} ms for a worker, a batch takes {cycle_ms:.1f} ms, and "
        "the slots are busy: more is asked than this can do",
        "add workers or devices; then a larger max_batch, a faster precision (fp16)",
    ),
)


def judge(measures: Measures, rules: Sequence[Rule] = RULES) -> list[Finding]:
    """What holds, in the order of `rules`: the first is the bottleneck."""
    values = measures.as_document()
    words: dict[str, Any] = {**values, "idle_share": 1.0 - (measures.busy_share or 0.0)}
    return [
        Finding(rule.name, rule.says.format(**words), rule.advice.format(**words))
        for rule in rules
        if all(condition.met(values) for condition in rule.when)
    ]


def rules_table(rules: Sequence[Rule] = RULES) -> str:
    """The rules as the Markdown table of docs/doctor.md."""
    lines = ["| rule | when all of these hold | what to change next |", "|---|---|---|"]
    for rule in rules:
        conditions = "<br>".join(f"`{condition}`" for condition in rule.when)
        lines.append(f"| `{rule.name}` | {conditions} | {rule.advice} |")
    return "\n".join(lines)
