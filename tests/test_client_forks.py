"""Clients and forks: the child knows whose they are, and a client that is gone leaves nothing."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable

import pytest

from producer import Client
from producer.errors import ConfigError


def test_a_client_that_is_gone_leaves_no_hook_behind(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[[], object]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.extend(hooks.values()))
    client = Client(redis_url).start()
    client.close()
    known = weakref.ref(client)
    del client
    gc.collect()
    assert registered == []
    assert known() is None


def test_every_open_client_is_refused_in_a_forked_child(redis_url: str) -> None:
    with Client(redis_url) as one, Client(redis_url) as two:
        child = os.fork()
        if child == 0:
            refused = 0
            for client in (one, two):
                try:
                    client.models()
                except ConfigError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert one.models() == two.models() == []
