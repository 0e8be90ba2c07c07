"""Who may see Flower, Celery's web monitor, and how turns look there (configs/flowerconfig.py)."""

from __future__ import annotations

import ast
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from producer.address import read_secret
from producer.errors import ConfigError
from producer.keys import SERVE_TASK

DEFAULT_ADDRESS = "127.0.0.1"
FILE_VARIABLE = "FLOWER_BASIC_AUTH_FILE"
VARIABLE = "FLOWER_BASIC_AUTH"
_SUMMARY = ("tasks", "rows", "batches", "mean_batch", "failed", "expired", "seconds", "error")


def credentials(
    environ: Mapping[str, str], arguments: Sequence[str], address: str, *, other_login: bool = False
) -> list[str]:
    """`user:password` of each person who may log in, from the environment or a secret's file.

    `address` is where Flower was explicitly told to listen, empty if it was not. Without a login
    (`other_login`: OAuth) an open page is for an explicit loopback address alone. Raises
    ConfigError for that, for a login on the command line, and for one that is none.
    """
    if any(_option(argument) == "basic_auth" for argument in arguments):
        raise ConfigError(
            "--basic-auth: every user of this machine can see it (ps); write it to a file and name "
            f"that in {FILE_VARIABLE}"
        )
    text, file = environ.get(VARIABLE, ""), environ.get(FILE_VARIABLE, "")
    if text and file:
        raise ConfigError(f"{VARIABLE} and {FILE_VARIABLE} are both set: keep one")
    if file:
        text = read_secret(file, FILE_VARIABLE)
    if text:
        return _logins(text, FILE_VARIABLE if file else VARIABLE)
    if other_login or is_loopback(address):
        return []
    raise ConfigError(
        f"Flower has no login: name a file with user:password in {FILE_VARIABLE}; or, for an open "
        f"page that this machine's users alone can reach, say --address={DEFAULT_ADDRESS}"
    )


def is_loopback(address: str) -> bool:
    """True for an address that other machines cannot reach."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def format_task(task: Any) -> Any:
    """A turn's arguments by name and its summary in a fixed order; other tasks as they are.

    `task` is Flower's own copy, whose `args` and `result` are the texts of Celery's events.
    """
    if task.name == SERVE_TASK:
        args, summary = _value(task.args), _value(task.result)
        if isinstance(args, tuple | list) and 1 <= len(args) <= 2:
            task.args = ", ".join(
                f"{name}={value}" for name, value in zip(("model", "reason"), args, strict=False)
            )
        if isinstance(summary, dict):
            shown = {name: summary[name] for name in _SUMMARY if name in summary}
            shown |= {name: value for name, value in summary.items() if name != "model"}
            task.result = ", ".join(f"{name}={value}" for name, value in shown.items())
    return task


def _value(text: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _logins(text: str, setting: str) -> list[str]:
    found = text.split(",")
    for login in found:
        user, _, password = login.partition(":")
        if not user or not password:
            raise ConfigError(f"{setting} must hold user:password, with commas between several")
    return found


def _option(argument: str) -> str:
    return argument.lstrip("-").partition("=")[0].replace("-", "_") if argument[:1] == "-" else ""
