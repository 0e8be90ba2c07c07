"""HTTP requests of tests, over real sockets."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fetch(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Status and body; 4xx and 5xx are answers too."""
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as failure:
        return failure.code, failure.read().decode()


def probe(url: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON document."""
    status, text = fetch(url, **headers)
    document: dict[str, Any] = json.loads(text)
    return status, document


def scrape(url: str) -> Samples:
    """All samples of a metrics page, by name and sorted labels."""
    status, text = fetch(url)
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    """One sample; KeyError if there is none."""
    return samples[name, tuple(sorted(labels.items()))]
