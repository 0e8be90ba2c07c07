"""How many rows a model takes in a time, in all and from one client."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field, model_validator

from producer.spec import MAX_COUNT

#: A row in twelve days.
_LEAST_PER_S = 1e-6


class RateLimit(BaseModel):
    """Token buckets of a model: rows a second on average, and at most a burst at once.

    A bucket starts full with its burst; None sets no limit. Clients with the same name share one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rows_per_s: float | None = Field(default=None, ge=_LEAST_PER_S, le=MAX_COUNT)
    burst_rows: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    per_client_rows_per_s: float | None = Field(default=None, ge=_LEAST_PER_S, le=MAX_COUNT)
    per_client_burst_rows: int | None = Field(default=None, ge=1, le=MAX_COUNT)

    @model_validator(mode="after")
    def _has_rates(self) -> RateLimit:
        for burst, rate in (
            ("burst_rows", "rows_per_s"),
            ("per_client_burst_rows", "per_client_rows_per_s"),
        ):
            if getattr(self, burst) is not None and getattr(self, rate) is None:
                raise ValueError(f"{burst} is set without {rate}, so nothing would refill it")
        if self.rows_per_s is None and self.per_client_rows_per_s is None:
            raise ValueError("set rows_per_s, per_client_rows_per_s or both")
        return self

    @property
    def least_burst_rows(self) -> int | None:
        """The smaller of the bursts that are set: a larger task would never pass."""
        set_rows = [b for b in (self.burst_rows, self.per_client_burst_rows) if b is not None]
        return min(set_rows, default=None)

    def with_bursts(self, task_rows: int) -> RateLimit:
        """The same with every burst set: a second's rows, and room for a task of `task_rows`."""
        bursts = {}
        for burst, rate_per_s in (
            ("burst_rows", self.rows_per_s),
            ("per_client_burst_rows", self.per_client_rows_per_s),
        ):
            if rate_per_s is not None and getattr(self, burst) is None:
                bursts[burst] = max(task_rows, math.ceil(rate_per_s))
        return self.model_copy(update=bursts)

    def published(self) -> dict[str, str]:
        """The fields of the hash that the scripts read."""
        return {name: repr(value) for name, value in self if value is not None}
