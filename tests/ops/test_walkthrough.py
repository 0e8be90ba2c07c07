"""The commands of docs/operations.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from producer.embedded import free_port
from tests.ops.conftest import Running
from tests.support.http import fetch, probe, scrape, value
from tests.support.processes import ROOT, until
from tests.support.shell import Shell, programs

pytestmark = pytest.mark.ops

TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
STACK, LOOK, BY_HAND, CONTAINERS = range(4)
#: The ports of the document and the services of compose.yaml that have them.
PORTS = {"6379": "redis", "9461": "worker-cpu-1", "9460": "exporter", "5555": "flower"}


def with_ports(block: str, ports: dict[str, int]) -> str:
    """The block with other ports, so that nothing of this machine is in the way."""
    return re.sub(r"\b\d{4}\b", lambda found: str(ports.get(found[0], found[0])), block)


def test_looking_at_the_stack(running: Running, tmp_path: Path) -> None:
    (tmp_path / "secrets").symlink_to(running.secrets)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    ports = {port: running.stack.service(name).port for port, name in PORTS.items()}
    shell = Shell(tmp_path, programs(tmp_path))
    try:
        shell.run(with_ports(BLOCKS[LOOK], ports))
    finally:
        shell.close()
    assert np.load(tmp_path / "scores.npy").shape == (10,)
    running.answered += 1
    for shown in ('trtq_tasks_answered_total{model="digits"}', "trtq_queue_oldest_task_age"):
        assert shown in shell.text
    assert '"name": "trtq.serve"' in shell.text
    assert running.secret("operator") not in shell.text


def test_the_same_by_hand(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    ports = {port: free_port() for port in PORTS}
    _, worker, exporter, flower = (f"http://127.0.0.1:{port}" for port in ports.values())
    shell = Shell(tmp_path, programs(tmp_path))
    try:
        shell.run(with_ports(BLOCKS[BY_HAND], ports))

        def answers(url: str) -> bool:
            try:
                return fetch(url)[0] == 200
            except OSError:
                return False

        for url in (f"{worker}/readyz", f"{exporter}/metrics", f"{flower}/healthcheck"):
            until(lambda url=url: answers(url), 40)
        assert value(scrape(f"{exporter}/metrics"), "trtq_workers", device="cpu") == 1
        assert fetch(f"{flower}/tasks")[0] == 200
        assert probe(f"{worker}/healthz")[1]["state"] == "running"
    finally:
        shell.close()


def test_the_other_commands_are_those_of_the_repository() -> None:
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert len(BLOCKS) == len((STACK, LOOK, BY_HAND, CONTAINERS))
    used = re.findall(r"\bmake ([\w-]+)", TEXT)
    assert {"stack", "secrets", "flower"} <= set(used) <= set(targets)
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    profiles = {name for service in compose.values() for name in service.get("profiles", [])}
    assert set(re.findall(r"^\| `(gpus?|cpu)` \|", TEXT, flags=re.MULTILINE)) == profiles


def test_every_alert_is_explained() -> None:
    alerts = yaml.safe_load((ROOT / "configs/prometheus/alerts.yml").read_text(encoding="utf-8"))
    names = [rule["alert"] for group in alerts["groups"] for rule in group["rules"]]
    assert sorted(re.findall(r"^\| `(Trtq\w+)` \|", TEXT, flags=re.MULTILINE)) == sorted(names)


def test_linked_files_exist() -> None:
    for link in re.findall(r"\]\(([\w./-]+)\)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
