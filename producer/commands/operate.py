"""`trtq exporter` and `trtq acl`: for those who run a deployment."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from producer.commands.shared import RedisUrl, url_for


def exporter(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 9460,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    redis_url: RedisUrl = None,
) -> None:
    """Serve queue depths, ages and workers as Prometheus metrics, read from Redis at each look.

    Needs the extra `metrics`. A Redis that is away shows as trtq_redis_up 0.
    """
    from producer.connection import connect, named_errors
    from producer.errors import MissingExtra, RedisUnavailable

    try:
        from producer.exporter import Exporter
    except ImportError as failure:
        raise MissingExtra(
            f"trtq exporter needs prometheus-client ({failure}): pip install 'trtq[metrics]'"
        ) from failure
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    url = url_for(redis_url)
    with connect(url) as connection:
        try:
            with named_errors(url):
                connection.ping()
        except RedisUnavailable:
            pass  # that is what the metrics will say
        served = Exporter(connection, host, port)
        served.start()
        try:
            typer.echo(f"metrics at http://{host}:{served.port}/metrics")
            served.wait()
        except KeyboardInterrupt:
            return
        finally:
            served.close()


def acl(
    producer: Annotated[
        list[str] | None,
        typer.Option(help="Submits tasks and reads its own answers; NAME=MODEL,MODEL restricts."),
    ] = None,
    worker: Annotated[list[str] | None, typer.Option(help="Serves models.")] = None,
    celery: Annotated[
        list[str] | None, typer.Option(help="Calls the Celery task trtq.infer.")
    ] = None,
    monitor: Annotated[
        list[str] | None, typer.Option(help="trtq exporter, status and models.")
    ] = None,
    operator: Annotated[list[str] | None, typer.Option(help="The same, submit and purge.")] = None,
    flower: Annotated[list[str] | None, typer.Option(help="Flower.")] = None,
    admin: Annotated[list[str] | None, typer.Option(help="Everything.")] = None,
    passwords: Annotated[
        Path | None,
        typer.Option(
            help="Folder with each user's password in a file of its name.",
            show_default="placeholders, which Redis refuses",
        ),
    ] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Make missing passwords.")] = False,
    db: Annotated[int, typer.Option(min=0, help="The number at the end of the Redis URL.")] = 0,
) -> None:
    """Print Redis access rules, for the file that redis-server's `aclfile` names.

    Options that take a NAME may be repeated. The user `default`, who needs no login, is switched
    off. The rules hold the SHA-256 of passwords and no password.
    """
    from producer.acl import Role, parse_user, rules
    from producer.errors import ConfigError

    given = {
        Role.ADMIN: admin,
        Role.WORKER: worker,
        Role.PRODUCER: producer,
        Role.CELERY: celery,
        Role.MONITOR: monitor,
        Role.OPERATOR: operator,
        Role.FLOWER: flower,
    }
    users = [parse_user(text, role) for role, texts in given.items() for text in texts or ()]
    if not users:
        raise ConfigError("name the users, for example: --admin root --worker gpu --producer web")
    if generate and passwords is None:
        raise ConfigError("--generate needs --passwords, the folder to make them in")
    for line in rules(users, passwords, generate=generate, db=db):
        typer.echo(line)
