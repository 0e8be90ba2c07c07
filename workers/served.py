"""One loaded model of a worker process: its engine, slots, replies and turns."""

from __future__ import annotations

import logging
from collections.abc import Callable

from producer.inbox import Inbox, Settlement
from producer.link import Link
from workers.engines.base import Engine
from workers.executor import Executor
from workers.feed import Feed
from workers.files import RowFiles
from workers.intake import Intake
from workers.ledger import Ledger
from workers.metrics import Counters
from workers.models import ModelConfig
from workers.replies import Replier
from workers.runner import BatchRunner
from workers.settings import WorkerSettings
from workers.stages import Stages
from workers.turn import Turn, TurnLimits

log = logging.getLogger("trtq.served")


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
    ) -> None:
        self.config = config
        self.engine = engine
        self.counters = Counters()
        self.stages = Stages()
        self.inbox = Inbox(link, config.name)
        self._consumer = consumer
        self._settings = settings
        self._files = files
        self._clock = clock
        self._on_death = on_death

    def start(self) -> None:
        """Loads the engine, makes and warms the slots. Raises the engine's errors."""
        self.engine.load()
        config, settings = self.config, self._settings
        self.spec = config.model_spec(self.engine.spec, self.engine.capacity)
        self.ledger = Ledger()
        self.feed = Feed(self.spec.max_batch, config.max_delay_ms, self._clock)
        runner = BatchRunner(
            self.engine, self.spec, self._files, self.counters, self.stages, self._clock
        )
        self.replier = Replier(
            self.inbox, self.counters, self.stages, self._settled, self._on_death, self._clock
        )
        self.executor = Executor(
            self.engine,
            self.spec,
            self.feed,
            runner,
            config.slots,
            self.replier.put,
            self._on_death,
        )
        self.intake = Intake(
            self.spec,
            self.counters,
            self.stages,
            self._clock,
            bulk_allowed=bool(settings.bulk_folders),
            max_deliveries=settings.max_deliveries,
        )
        self.replier.start()
        self.executor.start()
        log.info(
            "model %r is warm: %d slots, batches of up to %d rows",
            config.name,
            config.slots,
            self.spec.max_batch,
        )

    def turn(self, stopping: Callable[[], bool], others_wait: Callable[[], bool]) -> None:
        """Runs one turn."""
        settings, cover_rows = self._settings, self.spec.cover_rows
        limits = TurnLimits(
            held_rows=max(self.spec.max_batch * 2, self.spec.max_rows_per_task),
            unanswered_rows=4 * cover_rows,
            lease_ms=settings.lease_ms,
            linger_ms=settings.linger_ms,
            budget_ms=settings.turn_budget_s * 1000,
            max_deliveries=settings.max_deliveries,
            drain_ms=settings.drain_grace_s * 1000,
            finish_ms=settings.drain_grace_s * 1000,
        )
        Turn(
            self.inbox,
            self._consumer,
            self.intake,
            self.feed,
            self.replier,
            self.ledger,
            self.counters,
            limits,
            self._clock,
            stopping,
            others_wait,
        ).run()

    def close(self) -> None:
        """Stops the slots after what they run, sends the answers, frees the engine."""
        if hasattr(self, "executor"):
            self.executor.close()
            self.replier.close()
        self.engine.close()

    def _settled(self, settlements: list[Settlement]) -> None:
        self.ledger.settled(settlements)
