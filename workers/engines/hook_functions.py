"""Functions that a model's configuration names: imported from allowed modules only, and called."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from producer.errors import ConfigError, EngineFailed, HookFailed, InvalidInput
from producer.spec import TensorSpec
from workers.engines.base import POSTPROCESS, PREPROCESS
from workers.engines.hook_options import PostprocessOptions, PreprocessOptions

log = logging.getLogger("trtq.hooks")

#: With which arguments each hook is called, in order.
PARAMETERS = {PREPROCESS: ("inputs", "into"), POSTPROCESS: ("outputs",)}

_LONGEST_TEXT = 500


@dataclass(frozen=True)
class Hook:
    """A function of a model. `where` names model, key and function for messages; `tensors` are
    what clients send (preprocess) or get (postprocess).
    """

    where: str
    function: Callable[..., Any]
    tensors: tuple[TensorSpec, ...]

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns.

        Raises HookFailed with the function's error. InvalidInput, with which a function refuses
        its input, and errors of the engine's own buffers (DeviceLost) pass as they are.
        """
        try:
            return self.function(*arguments)
        except (ConfigError, EngineFailed, HookFailed, InvalidInput):
            raise
        except (Exception, SystemExit) as failure:
            log.warning("%s raised", self.where, exc_info=failure)
            raise self.failed(f"raised {_text(failure)}") from failure

    def failed(self, what: str) -> HookFailed:
        """The error that this function did `what`."""
        return HookFailed(f"{self.where} {what}")


def load_hook(
    model: str,
    key: str,
    options: PreprocessOptions | PostprocessOptions,
    allowed: Sequence[str],
) -> Hook:
    """Imports what `options` names, as the hook `key` (PREPROCESS or POSTPROCESS) of `model`.

    Raises ConfigError unless the module is one of `allowed` or inside one (code of others does
    not run), and for a failing import or what is no plain function of the hook's parameters.
    """
    where = f"model {model!r}: {key} {options.function!r}"
    module_name, _, name = options.function.partition(":")
    if not any(f"{module_name}.".startswith(f"{one}.") for one in allowed):
        raise ConfigError(
            f"{where}: hooks may be imported from "
            f"{', '.join(map(repr, allowed)) or 'no module'} only; to allow this one, add "
            f"{module_name} to TRTQ_HOOK_MODULES"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as failure:
        hint = ""
        if isinstance(failure, ModuleNotFoundError):
            hint = "; install it, or put its folder into PYTHONPATH"
        raise ConfigError(
            f"{where}: {module_name} cannot be imported ({_text(failure)}){hint}"
        ) from failure
    function = _checked(where, getattr(module, name, None), PARAMETERS[key])
    return Hook(where, function, options.spec)


def _checked(where: str, function: Any, parameters: tuple[str, ...]) -> Callable[..., Any]:
    if function is None:
        raise ConfigError(f"{where}: the module has no such function")
    if not callable(function):
        raise ConfigError(f"{where} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{where} must be a plain function: not async, and without yield")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as failure:
        raise ConfigError(f"{where} is called with ({', '.join(parameters)}): {failure}") from None
    except ValueError:
        # Callables written in C may tell no signature.
        pass
    return function  # type: ignore[no-any-return]


def _text(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {str(failure)[:_LONGEST_TEXT]}"
