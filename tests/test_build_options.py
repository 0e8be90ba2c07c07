"""The build block of a model's configuration, and the choice of the TensorRT package."""

from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError

from producer.errors import MissingExtra
from workers.tensorrt.flavor import find_flavor, make_logger
from workers.tensorrt.options import BuildOptions, Profile


def test_without_profiles_one_reaches_max_batch() -> None:
    (profile,) = BuildOptions().profiles_for(8)
    assert (profile.min_batch, profile.opt_batch, profile.max_batch) == (1, 8, 8)


def test_a_profile_out_of_order_is_refused() -> None:
    with pytest.raises(ValidationError, match="min <= opt <= max, got 4, 2, 8"):
        Profile(min_batch=4, opt_batch=2, max_batch=8)
    with pytest.raises(ValidationError, match="axes of 'ids'"):
        Profile(opt_batch=1, max_batch=1, axes={"ids": ((8, 4, 16),)})


def test_an_unknown_flavor_is_named() -> None:
    with pytest.raises(MissingExtra, match="'nope'"):
        find_flavor("nope")


def test_the_logger_keeps_errors_only(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs trtq[tensorrt-rtx]")
    flavor = find_flavor("tensorrt_rtx")
    assert flavor.can_build
    assert flavor.is_rtx
    logger = make_logger(flavor)
    severity = flavor.module.ILogger.Severity
    with caplog.at_level(logging.DEBUG, logger="trtq.tensorrt"):
        logger.log(severity.INFO, "quiet")
        logger.log(severity.ERROR, "broken")
    assert logger.last_errors() == "broken"
