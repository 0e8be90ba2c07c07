"""Who may see Flower, and how it shows turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from producer.errors import ConfigError
from tests.support.processes import ROOT
from workers.flower_options import credentials, format_task, is_loopback

FLOWER = [sys.executable, "-m", "celery", "-A", "workers.app", "flower"]
FLOWER += ["--conf=configs/flowerconfig.py", "--port=0"]


def task(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"name": "trtq.serve", "args": None, "result": None, **fields})


def test_logins_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "login"
    file.write_text("ann:one,bob:t:w:o\n")
    assert credentials({"FLOWER_BASIC_AUTH_FILE": str(file)}, [], "0.0.0.0") == [
        "ann:one",
        "bob:t:w:o",
    ]
    assert credentials({"FLOWER_BASIC_AUTH": "ann:one"}, [], "") == ["ann:one"]


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "10.0.0.5", "example.org"])
def test_an_open_page_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"FLOWER_BASIC_AUTH_FILE.*--address=127\.0\.0\.1"):
        credentials({}, [], address)
    assert credentials({}, [], address, other_login=True) == []


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_open_page_on_loopback_must_be_asked_for(address: str) -> None:
    assert is_loopback(address)
    assert credentials({}, [], address) == []


@pytest.mark.parametrize("argument", ["--basic-auth=a:b", "--basic_auth=a:b", "-basic_auth"])
def test_a_login_on_the_command_line_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="ps"):
        credentials({"FLOWER_BASIC_AUTH": "a:b"}, ["flower", argument], "127.0.0.1")


@pytest.mark.parametrize("text", ["ann", "ann:", ":one", "ann:one,", "ann:one,bob"])
def test_a_login_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="FLOWER_BASIC_AUTH must hold user:password"):
        credentials({"FLOWER_BASIC_AUTH": text}, [], "127.0.0.1")


def test_two_sources_of_logins_are_refused(tmp_path: Path) -> None:
    both = {"FLOWER_BASIC_AUTH": "a:b", "FLOWER_BASIC_AUTH_FILE": str(tmp_path)}
    with pytest.raises(ConfigError, match="keep one"):
        credentials(both, [], "")


def test_a_turn_is_shown_by_name() -> None:
    shown = format_task(
        task(
            args="('digits', 'work left')",
            result="{'model': 'digits', 'seconds': 0.5, 'tasks': 3, 'rows': 9, 'released': 0}",
        )
    )
    assert shown.args == "model=digits, reason=work left"
    assert shown.result == "tasks=3, rows=9, seconds=0.5, released=0"


@pytest.mark.parametrize("text", [None, "", "('digits", "[" * 5000, "{'a': b}", "'x'", "(1, 2, 3)"])
def test_what_cannot_be_read_stays_as_it_is(text: str | None) -> None:
    shown = format_task(task(args=text, result=text))
    assert (shown.args, shown.result) == (text, text)
    other = format_task(task(name="trtq.infer", args="('digits', 'x')"))
    assert other.args == "('digits', 'x')"


def test_flower_does_not_start_without_a_login() -> None:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("FLOWER_")}
    done = subprocess.run(FLOWER, cwd=ROOT, env=environ, capture_output=True, timeout=60, text=True)
    assert done.returncode == 78
    assert done.stderr.splitlines()[-1].startswith("flower: Flower has no login")
    assert "Traceback" not in done.stderr


def test_the_environment_goes_before_the_configuration() -> None:
    code = (
        "import json\n"
        "from flower.command import apply_env_options, apply_options, options\n"
        "apply_env_options()\n"
        "apply_options('flower', ['--conf=configs/flowerconfig.py'])\n"
        "names = 'address read_only max_tasks persistent natural_time basic_auth'.split()\n"
        "print(json.dumps({name: getattr(options, name) for name in names}))\n"
    )
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLOWER_")}
    environ["FLOWER_BASIC_AUTH"] = "ann:one"

    def options(**added: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**environ, **added},
            capture_output=True,
            check=True,
            timeout=60,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    assert options() == {
        "address": "127.0.0.1",
        "read_only": True,
        "max_tasks": 5000,
        "persistent": False,
        "natural_time": True,
        "basic_auth": ["ann:one"],
    }
    changed = options(FLOWER_READ_ONLY="false", FLOWER_MAX_TASKS="7", FLOWER_ADDRESS="0.0.0.0")
    assert (changed["read_only"], changed["max_tasks"]) == (False, 7)
    assert changed["address"] == "0.0.0.0"
