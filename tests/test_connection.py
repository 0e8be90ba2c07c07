"""Connecting: errors by name and with the URL, and no connection is kept for nothing."""

from __future__ import annotations

import pytest
import redis

from producer import Client
from producer.commands.shared import live_workers
from producer.connection import connect, named_errors
from producer.errors import ConfigError
from producer.purge import purge
from producer.status import look
from tests.support.no_redis import http_server


def test_a_database_that_does_not_exist_is_named(redis_url: str) -> None:
    url = redis_url.replace("/0", "/99")
    for start in (_ping, _client):
        with pytest.raises(ConfigError, match="no database of that number") as refused:
            start(url)
        assert f"Redis at {url} " in refused.value.message
        assert "`databases`" in refused.value.message


@pytest.mark.parametrize("login", ["", "gpu:secret@"])
def test_a_server_that_is_no_redis_is_named(login: str) -> None:
    with http_server() as port:
        for start in (_ping, _client):
            with pytest.raises(ConfigError, match="is no Redis") as refused:
                start(f"redis://{login}127.0.0.1:{port}/0")
            assert f"127.0.0.1:{port}/0" in refused.value.message
            assert "secret" not in refused.value.message


def _ping(url: str) -> None:
    with connect(url) as connection, named_errors(url):
        connection.ping()


def _client(url: str) -> None:
    with Client(url):
        pass


def test_what_looks_at_a_queue_gives_its_connections_back(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, protocol=2, max_connections=3) as own:
        for _ in range(5):
            look(own)
            assert live_workers(own, "m") == 0
            assert purge(own, "m") == 0
