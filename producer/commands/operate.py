"""`trtq exporter`: what operators leave running beside the workers."""

from __future__ import annotations

import signal
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
    from producer.connection import connect
    from producer.errors import MissingExtra

    try:
        from producer.exporter import Exporter
    except ImportError as failure:
        raise MissingExtra(
            f"trtq exporter needs prometheus-client ({failure}): pip install 'trtq[metrics]'"
        ) from failure
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with connect(url_for(redis_url)) as connection:
        served = Exporter(connection, host, port)
        served.start()
        try:
            typer.echo(f"metrics at http://{host}:{served.port}/metrics")
            served.wait()
        except KeyboardInterrupt:
            return
        finally:
            served.close()
