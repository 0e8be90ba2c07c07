"""The models that workers have published in Redis, cached for a short while."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import redis
from pydantic import ValidationError

from producer import keys
from producer.errors import ConfigError, UnknownModel
from producer.quote import quoted
from producer.spec import ModelSpec

log = logging.getLogger("trtq.catalog")

_MOST_NAMES = 50


class Catalog:
    """Published model specs by name. `clock` gives seconds and never goes back."""

    def __init__(self, connection: redis.Redis, ttl_s: float, clock: Callable[[], float]) -> None:
        self._redis = connection
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: dict[str, tuple[float, ModelSpec]] = {}

    def spec(self, model: str) -> ModelSpec:
        """The spec of `model`; raises UnknownModel with the known names, or redis-py's errors.

        InvalidInput for what is no model name, ConfigError for a spec that cannot be read.
        """
        known = self._known.get(keys.check_name(model))
        if known is not None and self._clock() < known[0]:
            return known[1]
        raw = self._redis.hget(keys.MODELS, model)
        if raw is None:
            self._known.pop(model, None)
            raise UnknownModel(f"no model {model!r}; published models: {self._names()}")
        spec = parse_spec(model, raw)
        self._known[model] = (self._clock() + self._ttl_s, spec)
        return spec

    def is_fresh(self, model: str) -> bool:
        """True if `spec` would answer without asking Redis."""
        known = self._known.get(model) if isinstance(model, str) else None
        return known is not None and self._clock() < known[0]

    def all(self) -> list[ModelSpec]:
        """Every published model, by name; what cannot be read is logged and left out."""
        published = read_published(self._redis.hgetall(keys.MODELS))
        for text in published.unreadable:
            log.warning("%s", text)
        return published.specs

    def _names(self) -> str:
        found: Any = self._redis.hkeys(keys.MODELS)
        names = [name for name in map(name_of, found) if name is not None]
        if not names:
            return "none: is a worker running?"
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(sorted(names)[:_MOST_NAMES]) + more


class Published(NamedTuple):
    """Specs by name, and a text for each entry of the hash that is none."""

    specs: list[ModelSpec]
    unreadable: list[str]


def read_published(found: Mapping[Any, Any]) -> Published:
    """What the hash of published models holds; a bad entry never hides the others."""
    specs: list[ModelSpec] = []
    unreadable: list[str] = []
    for field, raw in sorted(found.items()):
        name = name_of(field)
        if name is None:
            unreadable.append(no_name(field))
            continue
        try:
            specs.append(parse_spec(name, raw))
        except ConfigError as failure:
            unreadable.append(failure.message)
    return Published(specs, unreadable)


def name_of(field: bytes | str) -> str | None:
    """The model's name that `field` is, or None."""
    try:
        return keys.check_name(field.decode("ascii") if isinstance(field, bytes) else field)
    except ValueError:
        return None


def no_name(field: bytes | str) -> str:
    """What to say of an entry `field` for which `name_of` gives None."""
    return f"{keys.MODELS} has an entry {quoted(field)}, which is no model name"


def parse_spec(model: str, raw: bytes | str) -> ModelSpec:
    """The spec that was published under the name `model`; raises ConfigError."""
    try:
        spec = ModelSpec.model_validate_json(raw)
    except ValidationError as failure:
        raise ConfigError(
            f"the published spec of model {model!r} is not readable ({failure.error_count()} "
            "errors); workers and clients of different releases? Restart the workers"
        ) from None
    if spec.name != model:
        raise ConfigError(
            f"the published spec of model {model!r} is one of {quoted(spec.name)}: restart its "
            "workers"
        )
    return spec
