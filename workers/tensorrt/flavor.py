"""Which of the three TensorRT packages is installed, and a logger for it."""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

from producer.errors import MissingExtra

FlavorName = Literal["tensorrt", "tensorrt_lean", "tensorrt_rtx"]
_ORDER: tuple[FlavorName, ...] = ("tensorrt", "tensorrt_lean", "tensorrt_rtx")
_KEPT_ERRORS = 8
#: TensorRT for RTX 1.4 crashes with two threads in it at once, even in engines of their own; its
#: release notes for 1.3 promise "one network per thread" across GPUs only. So one lock for all.
_RTX_CALLS = threading.RLock()
_NO_LOCK: AbstractContextManager[None] = nullcontext()


class Flavor(NamedTuple):
    """An importable TensorRT module, its name and its version."""

    name: FlavorName
    module: Any
    version: str

    @property
    def can_build(self) -> bool:
        """Whether the module has a builder and an ONNX parser (the lean runtime has neither)."""
        return hasattr(self.module, "Builder") and hasattr(self.module, "OnnxParser")

    @property
    def is_rtx(self) -> bool:
        """Whether this is TensorRT for RTX."""
        return self.name == "tensorrt_rtx"

    @property
    def calls(self) -> AbstractContextManager[Any]:
        """What to hold around calls into the module that may come from several threads."""
        return _RTX_CALLS if self.is_rtx else _NO_LOCK


def find_flavor(wanted: str | None = None) -> Flavor:
    """Return the first usable flavor, or `wanted` alone; raises MissingExtra when there is none."""
    if wanted is not None and wanted not in _ORDER:
        raise MissingExtra(
            f"no TensorRT flavor is named {wanted!r}; use one of {', '.join(_ORDER)}"
        )
    for name in _ORDER if wanted is None else (wanted,):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):
            continue
        # A placeholder package imports but has no Runtime.
        if hasattr(module, "Runtime"):
            return Flavor(name, module, str(module.__version__))
    raise MissingExtra(
        f"{wanted or 'TensorRT'} is not installed or does not load; install trtq[gpu], "
        "trtq[tensorrt-lean] or trtq[tensorrt-rtx]"
    )


def make_logger(flavor: Flavor) -> Any:
    """Return an ILogger that writes to "trtq.tensorrt"; `last_errors()` gives its last errors."""
    base: Any = flavor.module.ILogger
    severity = flavor.module.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.CRITICAL,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.DEBUG,
        severity.VERBOSE: logging.DEBUG,
    }
    target = logging.getLogger("trtq.tensorrt")

    class Logger(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self._errors: deque[str] = deque(maxlen=_KEPT_ERRORS)

        def log(self, level: Any, message: str) -> None:
            number = levels.get(level, logging.WARNING)
            if number >= logging.ERROR:
                self._errors.append(message)
            target.log(number, "%s", message)

        def last_errors(self) -> str:
            return "; ".join(self._errors)

    return Logger()
