"""Kernels that TensorRT for RTX compiled when it ran a plan, kept for the next start."""

from __future__ import annotations

from typing import Any

from workers.tensorrt.cache import PlanCache


class KernelCache:
    """One IRuntimeCache for all contexts of an engine, read from and written to the plan cache.

    TensorRT ignores kernels of another GPU or version. Calls need Flavor.calls held.
    """

    def __init__(self, cache: PlanCache, key: str) -> None:
        self._cache = cache
        self._key = key
        self._native: Any = None
        self._kept_bytes = 0

    def use(self, options: Any) -> None:
        """Makes an IRuntimeConfig use the cache."""
        if self._native is None:
            self._native = options.create_runtime_cache()
            kept = self._cache.kernels(self._key)
            if kept and self._native.deserialize(kept):
                self._kept_bytes = len(kept)
        options.set_runtime_cache(self._native)

    def keep(self) -> None:
        """Writes the kernels if there are new ones."""
        if self._native is None:
            return
        data = bytes(self._native.serialize())
        if len(data) != self._kept_bytes:
            self._cache.keep_kernels(self._key, data)
            self._kept_bytes = len(data)
