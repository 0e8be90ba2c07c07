"""How `make stack` starts, watches and ends processes, with small programs in their place."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.compose_file import Local
from examples.stack import Stack
from tests.support.processes import until

#: Writes its name to the file `ended` when it is asked to end.
POLITE = """
import pathlib, signal, sys, time
def end(*_):
    with open("{folder}/ended", "a") as file:
        file.write("{name} ")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path("{folder}/{name}").touch()
time.sleep(60)
"""
DEAF = """
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("{folder}/{name}").touch()
time.sleep(60)
"""


class Maker:
    """Makes services whose health is a file that they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stacks: list[Stack] = []

    def service(
        self, name: str, code: str, *after: str, patience_s: float = 20, stop_s: float = 20
    ) -> Local:
        """A service that runs `code`."""
        text = code.replace("{folder}", str(self.folder)).replace("{name}", name)
        check = ["test", "-e", str(self.folder / name)]
        command = [sys.executable, "-c", text]
        return Local(name, command, {}, check, patience_s, stop_s, {}, name, list(after))

    def stack(self, *services: Local) -> Stack:
        """A stack of them, not started."""
        self.stacks.append(Stack(list(services), [], self.folder / "logs"))
        return self.stacks[-1]


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[Maker]:
    made = Maker(tmp_path)
    yield made
    for stack in made.stacks:
        stack.stop()


def test_a_taken_port_is_named_before_anything_starts(maker: Maker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        stack = maker.stack(maker.service("first", POLITE)._replace(ports={port: port}))
        with pytest.raises(SystemExit, match=f"port {port} of first is taken"):
            stack.start()
    assert not (maker.folder / "logs").exists()


def test_dependents_start_after_and_end_before(maker: Maker) -> None:
    first = maker.service("first", POLITE)
    needy = "import pathlib; assert pathlib.Path('{folder}/first').exists()" + POLITE
    stack = maker.stack(first, maker.service("second", needy, "first"))
    stack.start()
    assert stack.ended() is None
    stack.stop()
    assert (maker.folder / "ended").read_text().split() == ["second", "first"]


def test_a_service_that_ends_at_once_is_named_with_its_log(maker: Maker) -> None:
    stack = maker.stack(maker.service("broken", "raise SystemExit('no such thing')"))
    with pytest.raises(SystemExit, match=r"broken ended with 1:\nno such thing"):
        stack.start()


def test_a_service_that_is_never_healthy_is_named(maker: Maker) -> None:
    stack = maker.stack(maker.service("mute", "import time; time.sleep(60)", patience_s=0.5))
    with pytest.raises(SystemExit, match=r"mute is not healthy after 0\.5 s, see .*mute\.log"):
        stack.start()


def test_a_service_that_ends_later_is_noticed(maker: Maker) -> None:
    wait = "import os, time\nopen('{folder}/brief', 'w')\nwhile not os.path.exists('{folder}/go'):"
    stack = maker.stack(maker.service("brief", f"{wait}\n    time.sleep(0.01)"))
    stack.start()
    assert stack.ended() is None
    (maker.folder / "go").touch()
    assert until(stack.ended) == "brief"


def test_a_service_that_does_not_end_is_killed(
    maker: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = maker.stack(maker.service("deaf", DEAF, stop_s=0.3))
    stack.start()
    stack.stop()
    assert "deaf outlived 0.3 s; killing" in capsys.readouterr().err
    assert stack.ended() is None
