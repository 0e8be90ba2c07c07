"""One fault in a process of its own; its row is the last line of the output.

Arguments: the fault's name, its folder, seconds of load. SIGTERM ends it, with all it started.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.report import broken


class OutOfTime(BaseException):
    """The run's deadline has passed."""


def main() -> None:
    name, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Only once: what was started has to be ended in peace.
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_IGN)
        raise OutOfTime

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    started_s = time.monotonic()
    try:
        row = FAULTS[name](folder, seconds)
    except OutOfTime:
        row = broken(name, "ended by a signal: the run's deadline passed")
    except Exception as failure:  # noqa: BLE001 - one broken fault must not hide the others
        traceback.print_exc()
        row = broken(name, f"{type(failure).__name__}: {failure}"[:2000])
    print(json.dumps({"name": name, **row, "took_s": round(time.monotonic() - started_s, 1)}))


if __name__ == "__main__":
    main()
