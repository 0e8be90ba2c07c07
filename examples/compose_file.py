"""Reads compose.yaml and says how each of its services runs on this machine without a container.

Commands, environment, order and health checks are the file's own. What a container gives them is
put in their place: `/srv/trtq` is this checkout, mounts and secrets are the files behind them,
services are on 127.0.0.1, at their published port or at a free one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from producer.embedded import free_port, server_binary

ROOT = Path(__file__).resolve().parents[1]
#: Where images keep what their Dockerfiles copy from the checkout.
IMAGE_ROOT = "/srv/trtq"
_HERE = "127.0.0.1"
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:[-?])([^}]*))?\})")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class Local(NamedTuple):
    """A service as a process: what to run, when it counts as healthy, how long it may stop."""

    name: str
    command: list[str]
    env: dict[str, str]
    check: list[str]
    patience_s: float
    stop_s: float
    #: Container's port -> local port.
    ports: dict[int, int]
    #: The service in compose.yaml, and those that must be healthy before it starts.
    service: str
    after: list[str]

    @property
    def port(self) -> int:
        """The first of the local ports."""
        return next(iter(self.ports.values()))


class Left(NamedTuple):
    """A service that does not run here, and why."""

    name: str
    reason: str


class ComposeFile:
    """A compose file's document, its variables replaced."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    @classmethod
    def read(cls, environ: Mapping[str, str], path: Path = ROOT / "compose.yaml") -> ComposeFile:
        """The file with variables from `environ`; raises SystemExit for one that is missing."""
        return cls(_interpolated(yaml.safe_load(path.read_text(encoding="utf-8")), environ))

    @property
    def secrets(self) -> dict[str, Path]:
        """Secrets' names and the files that hold them."""
        return {
            name: (ROOT / secret["file"]).resolve()
            for name, secret in self._document["secrets"].items()
        }

    @property
    def volumes(self) -> list[str]:
        """Names of volumes."""
        return list(self._document["volumes"])

    def services(
        self,
        profiles: set[str],
        scale: Mapping[str, int],
        volumes: Path,
        *,
        free_ports: bool = False,
    ) -> tuple[list[Local], list[Left]]:
        """What runs here, in the order of dependencies, and what does not.

        `scale` asks for several of a service; named volumes become folders in `volumes`. Raises
        SystemExit for a `scale` of what does not run.
        """
        chosen = {
            name: service
            for name, service in self._document["services"].items()
            if not service.get("profiles") or profiles & set(service["profiles"])
        }
        runnable = {name: service for name, service in chosen.items() if _is_runnable(service)}
        left = [Left(name, "it is in its image only") for name in chosen.keys() - runnable.keys()]
        if wrong := [name for name in scale if name not in runnable or scale[name] < 1]:
            raise SystemExit(f"scale {wrong}: give 1 or more of {sorted(runnable)}")
        replicas = [
            (name, number) for name in _ordered(runnable) for number in range(scale.get(name, 1))
        ]
        pick = _ports(runnable, free_ports)
        ports = {(name, number): pick(name, number) for name, number in replicas}
        first = {name: ports[name, 0] for name in runnable}
        return [
            self._local(name, number, scale.get(name, 1), ports[name, number], first, volumes)
            for name, number in replicas
        ], sorted(left)

    def _local(
        self,
        name: str,
        number: int,
        of: int,
        ports: dict[int, int],
        first: dict[str, dict[int, int]],
        volumes: Path,
    ) -> Local:
        service = self._document["services"][name]
        shown = f"{name}-{number + 1}" if of > 1 else name
        translate = _translation({**first, name: ports}, ports, self._mounts(service, volumes))
        env = {key: translate(str(value)) for key, value in service.get("environment", {}).items()}
        command = _on_reserved_gpus(service)
        if command[:2] == ["trtq", "worker"]:
            # Containers of one service differ by their host's name, processes here by this.
            env.setdefault("TRTQ_WORKER_NAME", shown)
        health = service.get("healthcheck", {})
        kind, *test = health.get("test", ["CMD", "true"])
        check = [translate(part) for part in test]
        return Local(
            shown,
            _found([translate(part) for part in command]),
            env,
            ["sh", "-c", *check] if kind == "CMD-SHELL" else _found(check),
            patience_s=seconds(health.get("start_period", "60s")),
            stop_s=seconds(service.get("stop_grace_period", "10s")),
            ports=ports,
            service=name,
            after=list(service.get("depends_on", {})),
        )

    def _mounts(self, service: dict[str, Any], volumes: Path) -> dict[str, Path]:
        mounts = {f"/run/secrets/{name}": self.secrets[name] for name in service.get("secrets", [])}
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            mounts[target] = ROOT / source if source.startswith(".") else volumes / source
        return {**mounts, IMAGE_ROOT: ROOT}


def seconds(text: str) -> float:
    """Compose's durations of one unit, like 30s or 5m."""
    return float(text[:-1]) * _SECONDS[text[-1]]


def _interpolated(node: Any, environ: Mapping[str, str]) -> Any:
    def replace(found: re.Match[str]) -> str:
        dollar, name, operator, rest = found.groups()
        if dollar:
            return "$"
        value = environ.get(name, "")
        if not value and operator == ":?":
            raise SystemExit(f"compose.yaml: {name}: {rest}")
        return value or (rest if operator == ":-" else "")

    if isinstance(node, dict):
        return {key: _interpolated(value, environ) for key, value in node.items()}
    if isinstance(node, list):
        return [_interpolated(value, environ) for value in node]
    return _VARIABLE.sub(replace, node) if isinstance(node, str) else node


def _is_runnable(service: dict[str, Any]) -> bool:
    command = service.get("command", [""])
    return "build" in service or command[0] == "redis-server"


def _on_reserved_gpus(service: dict[str, Any]) -> list[str]:
    """The command, with GPUs by their number in the machine instead of in the container."""
    command: list[str] = list(service["command"])
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    ids = [number for device in reserved.get("devices", []) for number in device["device_ids"]]
    if ids:
        place = command.index("--devices") + 1
        command[place] = ",".join(ids[int(number)] for number in command[place].split(","))
    return command


def _found(command: list[str]) -> list[str]:
    program, *arguments = command
    ours = {
        "trtq": [sys.executable, "-m", "producer.cli"],
        "celery": [sys.executable, "-m", "celery"],
        "python": [sys.executable],
    }
    if program == "redis-server":
        return [str(server_binary()), *arguments]
    return [*ours.get(program, [program]), *arguments]


def _ordered(services: Mapping[str, dict[str, Any]]) -> list[str]:
    ordered: list[str] = []

    def visit(name: str) -> None:
        for before in services[name].get("depends_on", {}):
            if before in services and before not in ordered:
                visit(before)
        if name not in ordered:
            ordered.append(name)

    for name in services:
        visit(name)
    return ordered


def _ports(
    services: Mapping[str, dict[str, Any]], free_ports: bool
) -> Callable[[str, int], dict[int, int]]:
    taken: set[int] = set()

    def local(port: int, replica: int) -> int:
        if free_ports or replica or port in taken:
            port = next(found for _ in range(100) if (found := free_port()) not in taken)
        taken.add(port)
        return port

    def pick(name: str, replica: int) -> dict[int, int]:
        published = [port.split(":") for port in services[name].get("ports", [])]
        wanted = {int(inner): int(outer) for _, outer, inner in published}
        wanted |= {int(port): int(port) for port in services[name].get("expose", [])}
        return {inner: local(outer, replica) for inner, outer in wanted.items()}

    return pick


def _translation(
    hosts: Mapping[str, dict[int, int]], own: dict[int, int], mounts: Mapping[str, Path]
) -> Callable[[str], str]:
    targets = "|".join(re.escape(target) for target in sorted(mounts, key=len, reverse=True))
    paths = re.compile(rf"(?<![\w./-])({targets})(?![\w.-])")
    places = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, hosts))}|127\.0\.0\.1):(\d+)")
    numbers = re.compile(r"(?<![\w.:])(\d+)(?![\w.:])")

    def place(found: re.Match[str]) -> str:
        ports = hosts.get(found[1], own)
        return f"{_HERE}:{ports.get(int(found[2]), int(found[2]))}"

    def translate(text: str) -> str:
        text = paths.sub(lambda found: str(mounts[found[1]]), text)
        text = places.sub(place, text)
        text = numbers.sub(lambda found: str(own.get(int(found[1]), found[1])), text)
        return text.replace("0.0.0.0", _HERE)

    return translate
