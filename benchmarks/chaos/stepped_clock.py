"""Runs a module with a wall clock that can be stepped: `-m benchmarks.chaos.stepped_clock MODULE`.

`CHAOS_CLOCK` names a file with seconds to add to `time.time`, read again and again; it is patched
before anything else is imported, as a step of the machine's clock would reach every library.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path

_POLL_S = 0.05
_real, _real_ns = time.time, time.time_ns
_offset_s = 0.0


def _follow(path: Path) -> None:
    global _offset_s
    while True:
        try:
            _offset_s = float(path.read_text() or 0)
        except (OSError, ValueError):
            pass
        time.sleep(_POLL_S)


def install() -> None:
    """Patches the clock if CHAOS_CLOCK is set."""
    path = os.environ.get("CHAOS_CLOCK")
    if not path:
        return
    time.time = lambda: _real() + _offset_s
    time.time_ns = lambda: _real_ns() + int(_offset_s * 1e9)
    threading.Thread(target=_follow, args=(Path(path),), daemon=True).start()


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
