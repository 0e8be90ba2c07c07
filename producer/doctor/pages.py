"""One worker's /metrics page, fetched and parsed."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from producer.errors import ConfigError, Unavailable

_MOST_BYTES = 16 << 20

Labels = tuple[tuple[str, str], ...]


class Page(NamedTuple):
    """Samples of one page by name and sorted labels, as of `at_s` on the caller's clock."""

    url: str
    at_s: float
    samples: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float | None:
        """One sample, None where the page has none."""
        return self.samples.get((name, tuple(sorted(labels.items()))))

    def labelled(self, name: str, label: str, **fixed: str) -> dict[str, float]:
        """Values of `name` by their `label`, of those that have all labels in `fixed`."""
        wanted = set(fixed.items())
        return {
            dict(labels)[label]: number
            for (found, labels), number in self.samples.items()
            if found == name and label in dict(labels) and wanted <= set(labels)
        }

    @property
    def models(self) -> list[str]:
        """Models that the worker serves."""
        return sorted(self.labelled("trtq_slots", "model"))


def checked_url(url: str) -> str:
    """`url`, with /metrics where it has no path; raises ConfigError if it is none of HTTP."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        known = False
    if not known:
        raise ConfigError(
            f"metrics URL {url!r}: write it as http://host:port/metrics, as the worker logs it"
        )
    return parts._replace(path=parts.path if parts.path.strip("/") else "/metrics").geturl()


def fetch(url: str, now_s: float, timeout_s: float = 5.0) -> Page:
    """The page at `url`; raises Unavailable where it does not answer or is no metrics page."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            text = answer.read(_MOST_BYTES).decode()
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (urllib.error.URLError, OSError, http.client.HTTPException) as failure:
        raise Unavailable(
            f"the metrics page {url} does not answer ({failure}): is that worker running, and is "
            "its TRTQ_METRICS_HOST reachable from here?"
        ) from failure
    except ValueError as failure:
        raise Unavailable(
            f"{url} is no metrics page ({failure}): give the URL that the worker logs"
        ) from failure
    return Page(url, now_s, samples)
