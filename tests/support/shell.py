"""The commands of documents, run in one bash as a reader would type them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from producer.embedded import server_binary
from tests.support.processes import ROOT, until


def programs(folder: Path) -> Path:
    """A folder for PATH with this checkout's `trtq`, `celery`, `python`, and an embedded Redis."""
    made = folder / "bin"
    made.mkdir()
    server = server_binary()
    here = f"PYTHONPATH={shlex.quote(str(ROOT))} exec {sys.executable}"
    for name, command in (
        ("trtq", f"{here} -m producer.cli"),
        ("celery", f"{here} -m celery"),
        ("python", here),
        ("redis-server", f"exec {server}"),
        ("redis-cli", f"exec {server.with_name('redis-cli')}"),
    ):
        (made / name).write_text(f'#!/bin/sh\n{command} "$@"\n')
        (made / name).chmod(0o755)
    return made


class Shell:
    """One bash; what a command leaves running ends with it."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.output = folder / "shell.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRTQ_REDIS_")}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                ["bash", "-e"],
                cwd=folder,
                env={**environment, "PATH": f"{programs}:{os.environ['PATH']}"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.blocks = 0
        self.run("trap 'kill $(jobs -p); wait' EXIT")

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def run(self, block: str) -> None:
        """Runs a block of commands to its end; one that fails fails the test."""
        self.blocks += 1
        mark = f"block-{self.blocks}-done"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{block}\necho {mark}\n".encode())
        self.process.stdin.flush()

        def done() -> bool:
            assert self.process.poll() is None, self.text
            return mark in self.text

        until(done, 60)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
