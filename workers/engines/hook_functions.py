"""Functions that a model's configuration names: imported from allowed modules only, and called."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from producer.errors import ConfigError, EngineFailed, HookFailed, InvalidInput

log = logging.getLogger("trtq.hooks")

_LONGEST_TEXT = 500


class HookFunction:
    """One function of one model. `key` is its place in the configuration; `parameters` are the
    names of its positional arguments.
    """

    def __init__(self, model: str, key: str, reference: str, parameters: Sequence[str]) -> None:
        self._where = f"model {model!r}: {key} {reference!r}"
        self._module, _, self._name = reference.partition(":")
        self._parameters = parameters
        self._function: Callable[..., Any] | None = None

    def load(self, allowed: Sequence[str]) -> None:
        """Imports the function, if its module is one of `allowed` or inside one.

        Raises ConfigError where it is not, where the import fails, and for what is no plain
        function of `parameters`. Code of modules that are not allowed does not run.
        """
        if not any(f"{self._module}.".startswith(f"{name}.") for name in allowed):
            raise ConfigError(
                f"{self._where}: hooks may be imported from "
                f"{', '.join(map(repr, allowed)) or 'no module'} only; to allow this one, add "
                f"{self._module} to TRTQ_HOOK_MODULES"
            )
        try:
            module = importlib.import_module(self._module)
        except (Exception, SystemExit) as failure:
            hint = ""
            if isinstance(failure, ModuleNotFoundError):
                hint = "; install it, or put its folder into PYTHONPATH"
            raise ConfigError(
                f"{self._where}: {self._module} cannot be imported ({_text(failure)}){hint}"
            ) from failure
        self._function = self._checked(getattr(module, self._name, None))

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns.

        Raises HookFailed with the function's error; InvalidInput, with which a function refuses
        its input, and errors of the engine's own buffers (DeviceLost) pass as they are.
        """
        assert self._function is not None
        try:
            return self._function(*arguments)
        except (ConfigError, EngineFailed, HookFailed, InvalidInput):
            raise
        except (Exception, SystemExit) as failure:
            log.warning("%s raised", self._where, exc_info=failure)
            raise self.failed(f"raised {_text(failure)}") from failure

    def failed(self, what: str) -> HookFailed:
        """The error that this function did `what`."""
        return HookFailed(f"{self._where} {what}")

    def _checked(self, found: Any) -> Callable[..., Any]:
        if not callable(found):
            what = "has no such function" if found is None else f"is a {type(found).__name__}"
            raise ConfigError(f"{self._where}: {self._name} in {self._module} {what}")
        if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
            raise ConfigError(f"{self._where} must be a plain function, not async, no generator")
        call = f"{self._name}({', '.join(self._parameters)})"
        try:
            inspect.signature(found).bind(*self._parameters)
        except TypeError as failure:
            raise ConfigError(f"{self._where} is called as {call}: {failure}") from failure
        except ValueError:
            # Callables written in C may tell no signature.
            pass
        return found  # type: ignore[no-any-return]


def _text(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {str(failure)[:_LONGEST_TEXT]}"
