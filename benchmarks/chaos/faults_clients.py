"""Clients that die with tickets open: what they leave behind must expire."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.judge import check, judge
from benchmarks.chaos.rig import Rig
from producer.inbox import REPLY_TTL_S


def client_killed(folder: Path, seconds: float) -> dict[str, Any]:
    """SIGKILL of a client under load; its tasks are run, its replies expire, others go on."""
    with Rig(folder) as rig:
        rig.load(seconds)
        time.sleep(seconds / 2)
        victim = rig.clients.pop()
        victim.process.kill()
        clients = rig.loaded(seconds)
        row = judge("client SIGKILL with tickets open", clients, seconds)
        rig.settle(10.0)
        state = rig.look()
        check(row, state.rows == state.bytes == 0, f"the queue still holds {state}")
        expiries = {}
        for key in rig.raw.scan_iter("trtq:reply:*"):
            expiries[key.decode()] = rig.raw.ttl(key)
        row["reply_streams"] = expiries
        row["keys"] = rig.raw.dbsize()
        bounded = all(0 < ttl <= REPLY_TTL_S for ttl in expiries.values())
        check(row, bounded, f"reply streams without an expiry: {expiries}")
        check(row, len(expiries) <= len(rig.clients) + 1, f"reply streams {sorted(expiries)}")
        row["without_expiry"] = sorted(
            key.decode() for key in rig.raw.scan_iter() if rig.raw.ttl(key) == -1
        )
        grown = [key for key in row["without_expiry"] if "chaos." in key]
        check(row, not grown, f"keys of clients that never expire: {grown}")
        row["exit_codes"] = rig.stop_workers()
        check(row, row["exit_codes"] == [0, 0], f"exit codes {row['exit_codes']}")
        return row
