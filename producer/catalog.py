"""The models that workers have published in Redis, cached for a short while."""

from __future__ import annotations

import logging
from collections.abc import Callable

import redis
from pydantic import ValidationError

from producer import keys
from producer.errors import ConfigError, UnknownModel
from producer.spec import ModelSpec

log = logging.getLogger("trtq.catalog")


class Catalog:
    """Published model specs by name. `clock` gives seconds and never goes back."""

    def __init__(self, connection: redis.Redis, ttl_s: float, clock: Callable[[], float]) -> None:
        self._redis = connection
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: dict[str, tuple[float, ModelSpec]] = {}

    def spec(self, model: str) -> ModelSpec:
        """The spec of `model`; raises UnknownModel with the known names, or redis-py's errors."""
        known = self._known.get(model)
        if known is not None and self._clock() < known[0]:
            return known[1]
        raw = self._redis.hget(keys.MODELS, keys.check_name(model))
        if raw is None:
            self._known.pop(model, None)
            names = sorted(_text(name) for name in self._redis.hkeys(keys.MODELS))
            listed = ", ".join(names) if names else "none: is a worker running?"
            raise UnknownModel(f"no model {model!r}; published models: {listed}")
        spec = _parse(model, raw)
        self._known[model] = (self._clock() + self._ttl_s, spec)
        return spec

    def is_fresh(self, model: str) -> bool:
        """True if `spec` would answer without asking Redis."""
        known = self._known.get(model)
        return known is not None and self._clock() < known[0]

    def all(self) -> list[ModelSpec]:
        """Every published model whose spec can be read, by name."""
        found = self._redis.hgetall(keys.MODELS)
        specs = []
        for name, raw in sorted(found.items()):
            try:
                specs.append(_parse(_text(name), raw))
            except ConfigError as failure:
                log.warning("a published model is left out: %s", failure)
        return specs


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _parse(model: str, raw: bytes | str) -> ModelSpec:
    try:
        return ModelSpec.model_validate_json(raw)
    except ValidationError as failure:
        raise ConfigError(
            f"the published spec of model {model!r} is not readable ({failure.error_count()} "
            "errors); workers and clients of different releases? Restart the workers"
        ) from None
