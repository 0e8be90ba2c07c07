"""The services of compose.yaml as plain processes of this machine: `make stack`.

Redis, a worker on the CPU, the exporter and Flower, each from compose.yaml's own command and
environment, on 127.0.0.1. Ends on Ctrl-C, or when one of them ends by itself.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from examples.compose_file import ROOT, ComposeFile, Left, Local
from examples.make_secrets import make_secrets
from producer.embedded import server_binary

_POLL_S = 0.1
_KILL_S = 10.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Variables of ours that must come from compose.yaml and from nowhere else.
_OURS = ("TRTQ_", "FLOWER_")


class Stack:
    """Processes of services, each started when those that it needs are healthy."""

    def __init__(self, services: list[Local], left: list[Left], logs: Path) -> None:
        self.services = services
        self.left = left
        self._logs = logs
        self._running: list[tuple[Local, subprocess.Popen[bytes]]] = []

    def start(self) -> None:
        """Returns when all are healthy.

        Raises SystemExit if a port is taken, or a service ends or takes too long.
        """
        for service in self.services:
            _check_ports(service)
        self._logs.mkdir(parents=True, exist_ok=True)
        for service in self.services:
            for before, process in self._running:
                if before.service in service.after:
                    self._await(before, process)
            with self.log(service.name).open("wb") as output:
                process = subprocess.Popen(
                    service.command,
                    cwd=ROOT,
                    env=_environment(service),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # A Ctrl-C is ours to pass on, in order.
                    start_new_session=True,
                )
            self._running.append((service, process))
        for service, process in self._running:
            self._await(service, process)

    def service(self, name: str) -> Local:
        """The service of that name; raises KeyError."""
        return {service.name: service for service in self.services}[name]

    def log(self, name: str) -> Path:
        """The file of what a service prints."""
        return self._logs / f"{name}.log"

    def ended(self) -> str | None:
        """The name of a service that ended by itself."""
        return next((s.name for s, process in self._running if process.poll() is not None), None)

    def stop(self) -> None:
        """Stops all, dependents first; kills what outlives its stop_grace_period."""
        while self._running:
            needed = {name for service, _ in self._running for name in service.after}
            leaves = [one for one in self._running if one[0].service not in needed]
            leaves = leaves or list(self._running)
            for _, process in leaves:
                process.terminate()
            for service, process in leaves:
                _end(service, process)
                self._running.remove((service, process))

    def _await(self, service: Local, process: subprocess.Popen[bytes]) -> None:
        give_up_s = time.monotonic() + service.patience_s
        while not _healthy(service):
            if process.poll() is not None:
                tail = self.log(service.name).read_text(errors="replace")[-1500:]
                raise SystemExit(f"{service.name} ended with {process.returncode}:\n{tail}")
            if time.monotonic() > give_up_s:
                raise SystemExit(
                    f"{service.name} is not healthy after {service.patience_s:g} s, see "
                    f"{self.log(service.name)}"
                )
            time.sleep(_POLL_S)


def _check_ports(service: Local) -> None:
    for port in service.ports.values():
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SystemExit(
                    f"port {port} of {service.name} is taken (by another stack?): stop what uses "
                    "it, or run `python -m examples.stack --free-ports`"
                )


def _end(service: Local, process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(service.stop_s)
    except subprocess.TimeoutExpired:
        print(f"{service.name} outlived {service.stop_s:g} s; killing", file=sys.stderr)
        process.kill()
        process.wait(_KILL_S)


def _environment(service: Local) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    # The checks' redis-cli lies beside the server.
    path = f"{server_binary().parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    return {**inherited, "PATH": path, "PYTHONUNBUFFERED": "1", **service.env}


def _healthy(service: Local) -> bool:
    try:
        done = subprocess.run(
            service.check, env=_environment(service), capture_output=True, timeout=5, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


@contextmanager
def stack(
    state: Path,
    *,
    profiles: tuple[str, ...] = ("cpu",),
    scale: dict[str, int] | None = None,
    free_ports: bool = False,
) -> Iterator[Stack]:
    """A started stack that keeps data and logs in `state`; it stops at the end."""
    file = ComposeFile.read(os.environ)
    make_secrets(next(iter(file.secrets.values())).parent)
    volumes = state / "volumes"
    services, left = file.services(set(profiles), scale or {}, volumes, free_ports=free_ports)
    for name in file.volumes:
        (volumes / name).mkdir(parents=True, exist_ok=True)
    made = Stack(services, left, state / "logs")
    try:
        made.start()
        yield made
    finally:
        made.stop()


def main(
    profile: Annotated[list[str] | None, typer.Option(help="As Compose's --profile.")] = None,
    scale: Annotated[
        list[str] | None, typer.Option(help="As Compose's --scale: worker-cpu=2.")
    ] = None,
    free_ports: Annotated[
        bool, typer.Option("--free-ports", help="Instead of the published ones.")
    ] = False,
    state: Annotated[Path, typer.Option(help="Folder of data and logs.")] = ROOT / "build/stack",
) -> None:
    """Run compose.yaml's services as plain processes until Ctrl-C."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in _STOP_SIGNALS:
            # What follows ends by itself; a second Ctrl-C would leave processes behind.
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in _STOP_SIGNALS:
        signal.signal(each, on_signal)
    wanted = [text.partition("=") for text in scale or []]
    if wrong := [text for text in scale or [] if not re.fullmatch(r"[\w-]+=\d+", text)]:
        raise typer.BadParameter(f"--scale {wrong[0]!r}: write SERVICE=NUMBER")
    counts = {name: int(number) for name, _, number in wanted}
    print("starting compose.yaml's services ...", flush=True)
    try:
        with stack(
            state, profiles=tuple(profile or ["cpu"]), scale=counts, free_ports=free_ports
        ) as made:
            _show(made, state)
            while (ended := made.ended()) is None:
                time.sleep(_POLL_S)
            raise SystemExit(f"{ended} ended by itself, see {made.log(ended)}")
    except KeyboardInterrupt:
        print("stopped")


def _show(made: Stack, state: Path) -> None:
    pages = {"flower": "/", "exporter": "/metrics"}
    for service in made.services:
        if service.name == "redis":
            continue
        page = pages.get(service.name, "/metrics")
        print(f"{service.name:<12} http://127.0.0.1:{service.port}{page}")
    for name, reason in made.left:
        print(f"{name:<12} not run: {reason}")
    folder = next(iter(ComposeFile.read(os.environ).secrets.values())).parent
    print(f"\nFlower's login is in {folder / 'flower-login'}, logs are in {state / 'logs'}.")
    print("For clients and `trtq`:")
    print(f"export TRTQ_REDIS_URL=redis://operator@127.0.0.1:{made.service('redis').port}/0")
    print(f"export TRTQ_REDIS_PASSWORD_FILE={folder / 'operator'}", flush=True)


if __name__ == "__main__":
    typer.run(main)
