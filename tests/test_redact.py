"""No password is printed, in whatever form of URL it was given."""

from __future__ import annotations

import pytest

from producer.address import redact
from producer.config import ProducerSettings


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:s3cret@h:6379/0", "redis://:***@h:6379/0"),
        ("rediss://user:s3cret@h/0", "rediss://user:***@h/0"),
        ("redis://user:s3/cr?e@t@h/0", "redis://user:***@h/0"),
        ("redis://user@h/0", "redis://user@h/0"),
        ("redis://h/0?password=s3cret&db=1", "redis://h/0?password=***&db=1"),
        ("redis://h/0?db=1&PASSWORD=s3cret", "redis://h/0?db=1&PASSWORD=***"),
        ("rediss://h/0?ssl_password=s3cret&db=1", "rediss://h/0?ssl_password=***&db=1"),
    ],
)
def test_redacted(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_settings_do_not_show_the_url() -> None:
    assert "s3cret" not in repr(ProducerSettings(redis_url="redis://:s3cret@h/0"))
