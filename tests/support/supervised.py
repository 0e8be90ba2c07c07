"""`trtq worker --devices cpu` with another Celery application: the real supervisor, as a process.

Arguments: the application's module, the Redis URL, the folder of models.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workers.devices import parse_devices
from workers.launch import launch, make_plans


def main() -> int:
    """Supervises one worker until SIGTERM; returns the supervisor's exit code."""
    app, redis_url, models = sys.argv[1:]
    plans = make_plans(
        parse_devices("cpu"), redis_url=redis_url, models=[Path(models)], infer_threads=0
    )
    return launch(
        [
            plan._replace(
                command=tuple(app if part == "workers.app" else part for part in plan.command)
            )
            for plan in plans
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
