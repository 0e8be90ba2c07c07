"""What one task costs Redis: processor time, bytes and commands of add, claim, settle and reply.

`python -m benchmarks.redis_cost --json FILE`: the queue's own code on one side after the other, so
that each call carries exactly the number of tasks under test. No model runs.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import redis
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.report import Spread, machine, warn_if_busy, write_json
from producer.connection import connect
from producer.embedded import EmbeddedRedis
from producer.entries import Settlement
from producer.link import Link
from producer.mailbox import Mailbox
from producer.spec import ModelSpec, TensorSpec
from producer.task import InferenceTask, Reply, RowReference, Tensor
from producer.ticket import Ticket
from producer.wire import encode_reply, encode_task, sender_of
from workers.inbox import WorkerInbox

_CLIENT = "bench.0123456789ab"
_NORMAL = 1
#: As the client's sender: a flush ends at this many bytes.
_FLUSH_BYTES = 4 << 20
_ANSWER_S = 30.0
_REFERENCED_ROWS = 128


class Load(NamedTuple):
    """One kind of task. `payload_bytes` 0: rows by reference instead."""

    payload_bytes: int
    reply_bytes: int
    batch: int
    appendonly: bool

    @property
    def key(self) -> str:
        """Its name in the JSON file."""
        kind = f"{self.payload_bytes}" if self.payload_bytes else "reference"
        log = "aof" if self.appendonly else "memory"
        return f"{kind}/{self.reply_bytes}/{self.batch}/{log}"

    @property
    def rows(self) -> int:
        """Rows of one task."""
        return 1 if self.payload_bytes else _REFERENCED_ROWS


class Cost(NamedTuple):
    """What Redis spent on one task. `main_us` is the share of the thread that runs commands."""

    cpu_us: float
    main_us: float
    in_bytes: float
    out_bytes: float
    commands: float
    #: Written to the append-only file.
    log_bytes: float


LOADS = [
    *(
        Load(size, 100, batch, appendonly)
        for appendonly in (True, False)
        for batch in (1, 64)
        for size in (100, 1_000, 10_000, 100_000, 1_000_000)
    ),
    *(Load(1_000, reply, 64, True) for reply in (4_000, 100_000)),
    *(Load(0, 0, batch, True) for batch in (1, 64)),
]


class _Untaken:
    """Tickets of this benchmark are never taken back."""

    def cancel(self, ticket: Ticket) -> bool:
        return False


class Subject:
    """A queue, its client's mailbox and its worker's side, on one Redis."""

    def __init__(self, connection: redis.Redis) -> None:
        self._redis = connection
        self._inbox = WorkerInbox(Link(connection), "bench")
        self._mailbox = Mailbox(Link(connection), _CLIENT, time.monotonic)
        self._numbers = itertools.count()
        self._flushes = itertools.count(1)
        self._lock = threading.Lock()
        self._spec = ModelSpec(
            name="bench",
            inputs=(TensorSpec(name="x", dtype="uint8", shape=(None,)),),
            outputs=(TensorSpec(name="y", dtype="uint8", shape=(None,)),),
            max_batch=_REFERENCED_ROWS,
            max_rows_per_task=_REFERENCED_ROWS,
            queue_max_bytes=1 << 30,
        )

    def __enter__(self) -> Subject:
        self._inbox.ensure_groups()
        # A worker that lives, and a turn that runs: no bell is rung, as under load.
        self._inbox.attend("bench", 600_000)
        self._inbox.enter("bench")
        self._mailbox.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._mailbox.close()

    def cost(self, load: Load, seconds: float) -> Cost:
        """The mean over at least `seconds` of tasks of this kind."""
        # What ran before left other sizes in the allocator and other data in the caches.
        self._run(load, seconds / 4)
        before = self._spent()
        done = self._run(load, seconds)
        return Cost(*((a - b) / done for a, b in zip(self._spent(), before, strict=True)))

    def _run(self, load: Load, seconds: float) -> int:
        until_s = time.monotonic() + seconds
        done = self._cycle(load)
        while time.monotonic() < until_s:
            done += self._cycle(load)
        return done

    def _cycle(self, load: Load) -> int:
        """Tasks there and back: add, claim, settle, read the replies."""
        frames = [self._frame(load) for _ in range(load.batch)]
        at_once = max(1, _FLUSH_BYTES // len(frames[0]))
        for first in range(0, len(frames), at_once):
            part = [(load.rows, frame) for frame in frames[first : first + at_once]]
            _, ids = self._inbox.add(self._spec, _NORMAL, _CLIENT, next(self._flushes), part)
            assert None not in ids, "the queue refused a task"
        entries = self._inbox.claim("bench", load.batch * load.rows).entries
        assert len(entries) == load.batch, f"{len(entries)} of {load.batch} tasks claimed"
        self._inbox.settle([self._settlement(load, entry) for entry in entries])
        give_up_s = time.monotonic() + _ANSWER_S
        while self._mailbox.open_tickets:
            assert time.monotonic() < give_up_s, "replies are missing"
            time.sleep(0)
        return len(entries)

    def _frame(self, load: Load) -> bytes:
        task_id = f"{_CLIENT}-{next(self._numbers)}"
        if load.payload_bytes:
            data = Tensor("x", "uint8", (1, load.payload_bytes), bytes(load.payload_bytes))
            task = InferenceTask(task_id, load.rows, (data,), ttl_ms=600_000)
        else:
            files = (("x", "/data/images/part-0001.npy"),), (("y", "/data/scores/part-0001.npy"),)
            reference = RowReference(*files, 1_000_000, 1_000_000 + load.rows)
            task = InferenceTask(task_id, load.rows, reference=reference, ttl_ms=600_000)
        far_s = time.monotonic() + 600
        ticket = Ticket(task_id, "bench", _NORMAL, False, far_s, _Untaken(), self._lock)
        self._mailbox.expect(ticket)
        return encode_task(task)

    def _settlement(self, load: Load, entry: Any) -> Settlement:
        task_id, size = sender_of(entry.frame), load.reply_bytes
        assert task_id is not None, "a claimed entry is no task"
        outputs = (Tensor("y", "uint8", (1, size), bytes(size)),) if size else ()
        return Settlement(entry, load.rows, _CLIENT, encode_reply(Reply(task_id, outputs)))

    def _spent(self) -> tuple[float, ...]:
        info: Any = self._redis.info("all")
        cpu_s = info["used_cpu_user"] + info["used_cpu_sys"]
        main_s = info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"]
        return (
            1e6 * cpu_s,
            1e6 * main_s,
            info["total_net_input_bytes"],
            info["total_net_output_bytes"],
            info["total_commands_processed"],
            info.get("aof_current_size", 0),
        )


def _measure(rounds: int, seconds: float) -> dict[Load, list[Cost]]:
    found: dict[Load, list[Cost]] = {load: [] for load in LOADS}
    with tempfile.TemporaryDirectory(prefix="trtq-bench-") as folder, ExitStack() as stack:
        subjects = {}
        for appendonly in (True, False):
            server = EmbeddedRedis(folder=Path(folder) / str(appendonly), appendonly=appendonly)
            stack.enter_context(server)
            connection = stack.enter_context(connect(server.url))
            # As configs/redis/redis.conf; a rewrite of the log would fall into some rounds only.
            connection.config_set("auto-aof-rewrite-percentage", 0)
            subjects[appendonly] = stack.enter_context(Subject(connection))
        order, shuffler = list(LOADS), random.Random(7)
        for _ in range(rounds):
            # What ran before, and a machine that gets busier, are nobody's disadvantage.
            shuffler.shuffle(order)
            for load in order:
                found[load].append(subjects[load.appendonly].cost(load, seconds))
    return found


def _print(console: Console, found: dict[Load, list[Cost]]) -> None:
    table = Table("payload", "reply", "batch", "file", title="Redis, for one task")
    columns = ("CPU us (min-max)", "main thread us", "bytes in", "bytes out", "log", "commands")
    for name in columns:
        table.add_column(name, justify="right")
    for load, costs in found.items():
        spread = Spread.of([cost.cpu_us for cost in costs])
        median = Cost(*(statistics.median(values) for values in zip(*costs, strict=True)))
        payload = f"{load.payload_bytes:,}" if load.payload_bytes else f"{load.rows} rows by ref."
        table.add_row(
            payload,
            f"{load.reply_bytes:,}",
            str(load.batch),
            "AOF" if load.appendonly else "none",
            f"{spread.median:,.1f} ({spread.least:,.1f}-{spread.most:,.1f})",
            f"{median.main_us:,.1f}",
            f"{median.in_bytes:,.0f}",
            f"{median.out_bytes:,.0f}",
            f"{median.log_bytes:,.0f}",
            f"{median.commands:,.1f}",
        )
    console.print(table)


def main(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Where to write the numbers.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind of task.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds of one measurement.")] = 0.5,
) -> None:
    """Measure what tasks cost Redis."""
    console, where = Console(width=132), machine()
    warn_if_busy(console)
    found = _measure(rounds, seconds)
    _print(console, found)
    if json_path is not None:
        document: dict[str, Any] = {
            "per_task": {
                load.key: {
                    name: Spread.of(values)._asdict()
                    for name, values in zip(Cost._fields, zip(*costs, strict=True), strict=True)
                }
                for load, costs in found.items()
            },
            "machine": where,
        }
        write_json(json_path, document)


if __name__ == "__main__":
    typer.run(main)
