"""One loaded model of a worker process: its engine, slots, replies and turns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from producer.entries import Entry, Settlement
from producer.errors import BatchTimeout
from producer.link import Link
from workers.attempts import Attempt, Attempts
from workers.claims import ClaimOrder
from workers.engines.base import Engine
from workers.executor import Executor
from workers.feed import Feed
from workers.files import RowFiles
from workers.inbox import WorkerInbox
from workers.incidents import RETURNED, Incidents
from workers.intake import Intake
from workers.ledger import Ledger
from workers.metrics import Counters
from workers.models import ModelConfig
from workers.ranges import NO_RANGES, Ranges
from workers.replies import Replier
from workers.runner import BatchRunner
from workers.settings import WorkerSettings
from workers.stages import Stages
from workers.tracing import NO_TRACING, Tracing
from workers.turn import Turn, TurnLimits, hand_back

log = logging.getLogger("trtq.served")

#: How long closing waits for a batch; the turn has waited for it before.
_CLOSE_S = 5.0
#: One wait for new entries, in a process with one model and with several.
_WAIT_ALONE_MS = 100.0
_WAIT_SHARED_MS = 10.0


class Served:
    """A model that this process serves. `start` loads and warms it; `clock` gives ms."""

    def __init__(
        self,
        config: ModelConfig,
        engine: Engine,
        link: Link,
        consumer: str,
        settings: WorkerSettings,
        files: RowFiles,
        clock: Callable[[], float],
        on_death: Callable[[str], None],
        ranges: Ranges = NO_RANGES,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.config = config
        self.engine = engine
        self.counters = Counters()
        self.stages = Stages()
        self.incidents = Incidents(config.name, self.counters)
        self.inbox = WorkerInbox(link, config.name, settings.letter_limits)
        self._order = ClaimOrder()
        self._consumer = consumer
        self._settings = settings
        self._files = files
        self._clock = clock
        self._on_death = on_death
        self._ranges = ranges
        self._tracing = tracing

    def start(self) -> None:
        """Loads the engine, makes and warms the slots. Raises the engine's errors."""
        self.engine.load()
        config, settings = self.config, self._settings
        self.spec = config.model_spec(self.engine.spec, self.engine.capacity)
        limit = config.rate_limit
        self.rate_limit = limit and limit.with_bursts(self.spec.max_rows_per_task)
        self.ledger = Ledger()
        self.feed = Feed(self.spec.max_batch, config.max_delay_ms, self._clock)
        runner = BatchRunner(
            self.engine,
            self.spec,
            self._files,
            self.counters,
            self.stages,
            self.incidents,
            self._clock,
            self._ranges,
            self._tracing,
        )
        self.replier = Replier(
            self.inbox,
            self.counters,
            self.stages,
            self.incidents,
            self._settled,
            self._on_death,
            self._clock,
            self._ranges,
            self._tracing,
        )
        self.executor = Executor(
            self.engine,
            self.spec,
            self.feed,
            runner,
            config.slots,
            self.replier.put,
            self._on_death,
            self.incidents,
            self._clock,
        )
        self.intake = Intake(
            self.spec,
            self.counters,
            self.stages,
            self.incidents,
            self._clock,
            bulk_allowed=bool(settings.bulk_folders),
            max_deliveries=settings.max_deliveries,
            tracing=self._tracing,
        )
        self.replier.start()
        self.executor.start()
        log.info(
            "model %r is warm: %d slots, batches of up to %d rows",
            config.name,
            config.slots,
            self.spec.max_batch,
            extra={"model": config.name},
        )

    def turn(
        self, stopping: Callable[[], bool], others_wait: Callable[[], bool], *, shared: bool
    ) -> None:
        """Runs one turn; `shared` says that the process has other models too."""
        settings, cover_rows = self._settings, self.spec.cover_rows
        drain_ms = settings.drain_grace_s * 1000
        limits = TurnLimits(
            # A batch for every slot: they may all come at once.
            held_rows=self.spec.max_batch * max(2, self.config.slots),
            unanswered_rows=4 * cover_rows,
            lease_ms=settings.lease_ms,
            linger_ms=settings.linger_ms,
            wait_ms=_WAIT_SHARED_MS if shared else _WAIT_ALONE_MS,
            budget_ms=settings.turn_budget_s * 1000,
            max_deliveries=settings.max_deliveries,
            drain_ms=drain_ms,
            finish_ms=drain_ms + (self.batch_timeout_ms or 0.0),
        )
        Turn(
            self.inbox,
            self._consumer,
            self.intake,
            self.feed,
            self.replier,
            self.ledger,
            self._order,
            self.incidents,
            limits,
            self._clock,
            stopping,
            others_wait,
            self._ranges,
        ).run()

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.name

    @property
    def batch_timeout_ms(self) -> float | None:
        """How long one run may take; None: for ever."""
        return self.config.batch_timeout_ms

    @property
    def attempts(self) -> Attempts:
        """What the slots run now."""
        return self.executor.attempts

    def give_up(self, hung: Sequence[Attempt], *, alone: bool) -> None:
        """Answers the task that hangs if it ran `alone` in this process; hands all others back.

        What hung together is a suspect then: run alone by whoever takes it.
        """
        entries: list[Entry] = []
        suspects: list[str] = []
        for attempt in hung:
            culprit = attempt.tasks[0] if alone and len(attempt.tasks) == 1 else None
            for held in attempt.batch:
                if held is culprit:
                    failure = BatchTimeout(
                        f"task {held.task.task_id} ran alone for more than "
                        f"{self.config.batch_timeout_s:g} s and did not end; its worker is "
                        f"replaced. If model {self.name!r} needs longer, raise its batch_timeout_s"
                    )
                    self.replier.put([self.intake.timed_out(held, failure)])
                    continue
                deliveries = held.entry.deliveries
                if held in attempt.tasks:
                    deliveries = max(deliveries, self._settings.max_deliveries)
                    suspects.append(held.task.task_id)
                entries.append(held.entry._replace(deliveries=deliveries))
        self.incidents.record(
            RETURNED, BatchTimeout.code, suspects, "the batch that they were in hangs"
        )
        hand_back(
            entries,
            self.inbox,
            self._consumer,
            self._settings.lease_ms,
            self.ledger,
            self.incidents,
        )

    def close(self) -> bool:
        """Stops the slots after what they run, sends the answers, frees the engine.

        False if a slot hangs: its engine is in use and cannot be freed.
        """
        ended = True
        if hasattr(self, "executor"):
            ended = self.executor.close(_CLOSE_S)
            self.replier.close()
        if ended:
            self.engine.close()
        return ended

    def _settled(self, settlements: list[Settlement]) -> None:
        self.ledger.settled(settlements)
