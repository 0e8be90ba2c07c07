"""`trtq worker` for the load: its own supervisor, the app of benchmarks.chaos.app.

Arguments: name, Redis URL, model folder, folder for bulk jobs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workers.devices import parse_devices
from workers.launch import Plan, launch, make_plans


def _plan(plan: Plan) -> Plan:
    python, _, celery, *rest = plan.command
    own = ["benchmarks.chaos.app" if part == "workers.app" else part for part in rest]
    return plan._replace(command=(python, "-m", "benchmarks.chaos.stepped_clock", celery, *own))


def main() -> int:
    name, url, models, bulk_root = sys.argv[1:]
    plans = make_plans(
        parse_devices("cpu"),
        redis_url=url,
        models=[Path(models)],
        bulk_roots=[Path(bulk_root)],
        name=name,
        infer_threads=0,
    )
    return launch([_plan(plan) for plan in plans])


if __name__ == "__main__":
    sys.exit(main())
