"""A Celery worker whose stages are not measured: arguments as of `celery`."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from celery.__main__ import main

from workers import served
from workers.stages import Stages


class NoStages(Stages):
    """Measures nothing."""

    def observe(self, stage: str, ms: float) -> None:
        pass

    def observe_many(self, stage: str, ms: Iterable[float]) -> None:
        pass

    def batch(self, rows: int) -> None:
        pass

    def failure(self, code: str) -> None:
        pass


if __name__ == "__main__":
    served.Stages = NoStages  # type: ignore[misc]
    sys.argv[0] = "celery"
    sys.exit(main())
