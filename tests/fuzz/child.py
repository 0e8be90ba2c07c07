"""One target in a process of its own: `python -m tests.fuzz.child` is what the runner starts."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

#: Most address space of a child: what escapes the tracing of Python's memory ends here.
ADDRESS_SPACE_BYTES = 6 << 30
MOST_BYTES = 4096
_REPORT_EVERY_S = 1.0


def main() -> None:
    """Runs until the time is over; the score so far is in `--report` at any time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--engine", choices=("atheris", "mutations"), required=True)
    parser.add_argument("--report", type=Path, required=True)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if given.engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=["producer", "workers"]):
            from tests.fuzz.targets import targets
    else:
        from tests.fuzz.targets import targets
    from tests.fuzz.judge import measured

    run = _Run(targets()[given.target], given)
    with measured():
        run.known()
        if given.engine == "atheris":
            run.guided()
        else:
            run.blind()
    run.report()


class _Run:
    def __init__(self, target: Any, given: argparse.Namespace) -> None:
        from tests.fuzz.judge import Score

        self._target = target
        self._given = given
        self._seeds: list[bytes] = target.seeds()
        self._chance = random.Random(given.seed)
        self._score = Score()
        self._end_s = 0.0
        self._reported_s = 0.0

    def known(self) -> None:
        """The seeds and what was made to be expensive."""
        for data in [*self._seeds, *self._target.hostile()]:
            self._one(data)
        self._end_s = time.monotonic() + self._given.seconds

    def blind(self) -> None:
        """Mutations of the seeds."""
        from tests.fuzz.mutate import mutate

        while time.monotonic() < self._end_s:
            data = self._chance.choice(self._seeds)
            self._one(mutate(data, self._seeds, self._chance, MOST_BYTES))

    def guided(self) -> None:
        """Mutations of whatever reached new code. Does not return: libFuzzer ends the process."""
        import atheris

        from tests.fuzz.mutate import mutate

        corpus = tempfile.mkdtemp()
        for number, data in enumerate(self._seeds):
            Path(corpus, str(number)).write_bytes(data)

        def ours(data: bytes, most: int, seed: int) -> bytes:
            if seed & 1:
                return bytes(atheris.Mutate(data, most))
            return mutate(data, self._seeds, random.Random(seed), most)

        def one(data: bytes) -> None:
            self._one(data)
            if time.monotonic() >= self._end_s:
                self.report()
                sys.stdout.flush()
                os._exit(0)

        options = [f"-max_len={MOST_BYTES}", f"-seed={self._given.seed}", "-timeout=60"]
        options += ["-rss_limit_mb=0", "-verbosity=0", "-print_final_stats=0"]
        options += [f"-artifact_prefix={self._given.report}.", corpus]
        atheris.Setup([sys.argv[0], *options], one, custom_mutator=ours)
        atheris.Fuzz()

    def report(self) -> None:
        """The score so far, whole or not at all."""
        temporary = self._given.report.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self._score)))
        temporary.replace(self._given.report)

    def _one(self, data: bytes) -> None:
        from tests.fuzz.judge import examine

        self._score.add(self._target, data, examine(self._target, data))
        if time.monotonic() - self._reported_s > _REPORT_EVERY_S:
            self.report()
            self._reported_s = time.monotonic()


if __name__ == "__main__":
    main()
