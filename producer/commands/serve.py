"""`trtq worker` and `trtq redis`: the processes that run until they are stopped."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from producer.commands.common import DEFAULT_URL, RedisUrl, reported
from producer.connection import connect

DEFAULT_MODELS = [Path("configs/models")]


@reported
def worker(
    devices: Annotated[
        str, typer.Option(help="cpu, all (every GPU), or GPU indices like 0,1.")
    ] = "cpu",
    models: Annotated[
        list[Path],
        typer.Option(envvar="TRTQ_MODELS", help="Folder of model YAML files; may be repeated."),
    ] = DEFAULT_MODELS,
    bulk_root: Annotated[
        list[Path] | None,
        typer.Option(
            envvar="TRTQ_BULK_ROOTS",
            help="Folder in which bulk jobs may read and write; may be repeated. None: no bulk.",
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="First part of the node names.")] = "",
    infer_threads: Annotated[
        int, typer.Option(min=0, help="Threads for the Celery task trtq.infer; 0: none.")
    ] = 8,
    loglevel: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    redis_url: RedisUrl = DEFAULT_URL,
) -> None:
    """Serves models: one process per device, restarted when it fails.

    SIGTERM or Ctrl-C finishes what runs and stops; a second one kills.
    """
    connect(redis_url).close()  # A URL that is none ends here, not in every child.
    # By name: the producer side never imports the worker side.
    launch = importlib.import_module("workers.launch")
    plans = launch.make_plans(
        launch.parse_devices(devices),
        redis_url=redis_url,
        models=models,
        bulk_roots=bulk_root or (),
        name=name,
        infer_threads=infer_threads,
        loglevel=loglevel,
    )
    raise typer.Exit(launch.launch(plans))


@reported
def redis_server(
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0: a free one.")] = 6379,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Keeps the data here; else they are dropped.")
    ] = None,
) -> None:
    """Runs an embedded Redis on 127.0.0.1 until Ctrl-C, for trying things out."""
    from producer.embedded import EmbeddedRedis

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    server = EmbeddedRedis(port, folder, appendonly=folder is not None)
    try:
        server.start()
        typer.echo(f"Redis at {server.url}; Ctrl-C stops it")
        code = server.wait()
    except KeyboardInterrupt:
        code = 0
    finally:
        server.close()
        signal.signal(signal.SIGTERM, before)
    if code:
        typer.echo(f"error [redis_unavailable]: redis-server ended with {code}", err=True)
        raise typer.Exit(1)
