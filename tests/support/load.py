"""A client process of the load test: submits rows, checks each answer, prints what it saw."""

from __future__ import annotations

import json
import sys

import numpy as np

from producer import Client
from tests.support.models import checksum


def main() -> None:
    """Arguments: Redis URL, seed, number of tasks."""
    url, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rows = np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)
    ended: list[str] = []
    with Client(url) as client:
        tickets = [client.submit("checksum", row) for row in rows]
        for ticket in tickets:
            ticket.add_done_callback(lambda t: ended.append(t.task_id))
        results = [int(ticket.result(60)) for ticket in tickets]
    wrong = int((np.array(results) != checksum(rows)).sum())
    print(json.dumps({"answered": len(ended), "distinct": len(set(ended)), "wrong": wrong}))


if __name__ == "__main__":
    main()
