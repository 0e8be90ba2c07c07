"""A client process of the key test: submits keys in an order of its own, prints the answers."""

from __future__ import annotations

import json
import random
import sys

import numpy as np

from producer import Client


def main() -> None:
    """Arguments: Redis URL, seed, number of keys, repeats of each. Starts at a line of stdin."""
    url, seed, count, repeats = sys.argv[1], *map(int, sys.argv[2:5])
    rows = np.random.default_rng(7).integers(0, 256, (count, 16), dtype=np.uint8)
    order = list(range(count)) * repeats
    random.Random(seed).shuffle(order)
    with Client(url) as client:
        client.spec("checksum")
        print("ready", flush=True)
        sys.stdin.readline()
        tickets = [
            (index, client.submit("checksum", rows[index], key=f"key {index}")) for index in order
        ]
        answers = [[index, int(ticket.result(60)), ticket.task_id] for index, ticket in tickets]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
