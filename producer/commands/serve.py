"""`trtq worker` and `trtq redis`: what runs until it is stopped."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from producer.commands.shared import RedisUrl, one_line, url_for
from producer.errors import ConfigError, InvalidInput

#: As of the processes that it starts: wrong, and wrong again if tried again.
EXIT_CONFIG = 78


class LogLevel(str, Enum):
    """Levels of Celery's log, least urgent first; the last two are one."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"
    FATAL = "fatal"


class WorkerCommand(TyperCommand):
    """Ends with EXIT_CONFIG and one line where an option or a setting is wrong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the options; one that does not exist stays an error of usage."""
        with _refusals():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        with _stoppable(), _refusals():
            return super().invoke(ctx)


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM or Ctrl-C ends the block and the command with 0, and what comes after it is ignored.

    For all that is done before the supervisor runs, which heeds both itself.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        # A process that ends with a code already would end by the next signal instead.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit from None
    finally:
        for each, handler in before.items():
            if signal.getsignal(each) is stop:
                signal.signal(each, handler)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (typer.BadParameter, ConfigError, InvalidInput) as failure:
        if isinstance(failure, typer.BadParameter):
            text = failure.format_message()
        else:
            text = failure.message
        # In the format of the worker's log.
        importlib.import_module("workers.logs").say(f"trtq worker: {one_line(text)}")
        raise typer.Exit(EXIT_CONFIG) from None


def worker(
    devices: Annotated[
        str,
        typer.Option(
            help="cpu, all, or GPUs by index (as in nvidia-smi) or UUID, like 0,GPU-8932f937; "
            "one process each."
        ),
    ] = "cpu",
    models: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of model configurations; may be repeated (or TRTQ_MODELS).",
            show_default="configs/models",
        ),
    ] = None,
    bulk_root: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder that bulk jobs may read and write; may be repeated (or TRTQ_BULK_ROOTS).",
            show_default="none: bulk jobs are refused",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            envvar="TRTQ_WORKER_NAME",
            help="First part of the workers' node names, if the host has several `trtq worker`.",
        ),
    ] = "",
    infer_threads: Annotated[
        int,
        typer.Option(min=0, help="Threads that serve the Celery task trtq.infer; 0: it is not."),
    ] = 8,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            envvar="TRTQ_METRICS_PORT",
            help="First port of /metrics, /healthz, /readyz and /drain, one for each process; "
            "0: none.",
        ),
    ] = 0,
    affinity: Annotated[
        bool,
        typer.Option(
            "--affinity/--no-affinity",
            envvar="TRTQ_AFFINITY",
            help="Bind each process to the CPU cores near its GPU, where the driver tells them.",
        ),
    ] = True,
    loglevel: Annotated[
        LogLevel,
        typer.Option(
            case_sensitive=False, metavar="LEVEL", help="debug, info, warning, error or critical."
        ),
    ] = LogLevel.INFO,
    redis_url: RedisUrl = None,
) -> None:
    """Serve models: a Celery worker process for each device, started again when it fails.

    The first SIGTERM or Ctrl-C lets running batches finish, for at most TRTQ_DRAIN_GRACE_S and
    10 seconds; the second ends at once. Waits for a Redis that does not answer yet.
    Exit code 78: the configuration is wrong.
    """
    from producer.connection import connect, wait_until_answers

    url = url_for(redis_url)
    connect(url).close()  # a URL that is none is refused here, not in every process
    folders = _folders(models, "TRTQ_MODELS", "configs/models")
    # By name: the producer is installed and imported without the workers' needs.
    launch = importlib.import_module("workers.launch")
    plans = launch.make_plans(
        importlib.import_module("workers.devices").parse_devices(devices),
        # Without the option each process reads the environment and its files when it starts.
        redis_url=url if redis_url else None,
        models=folders,
        bulk_roots=_folders(bulk_root, "TRTQ_BULK_ROOTS", ""),
        name=name,
        infer_threads=infer_threads,
        loglevel=loglevel.value,
        affinity=affinity,
    )
    plans = importlib.import_module("workers.observe").with_ports(plans, metrics_port)
    # Each process reads them again; said here it is not lost among what they write.
    importlib.import_module("workers.settings").worker_settings()
    importlib.import_module("workers.models").load_models(folders)
    wait_until_answers(url, lambda line: typer.echo(f"trtq worker: {line}", err=True))
    raise typer.Exit(launch.launch(plans))


def redis(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 6379,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Keep the data here; without it they go with the server."),
    ] = None,
) -> None:
    """Run an embedded Redis on 127.0.0.1, for development and single machines.

    Needs the extra `embedded`, or a redis-server named by TRTQ_REDIS_SERVER.
    """
    from producer.embedded import EmbeddedRedis
    from producer.errors import RedisUnavailable

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with EmbeddedRedis(port, folder, appendonly=folder is not None) as server:
            typer.echo(f"Redis at {server.url}\nexport TRTQ_REDIS_URL={server.url}")
            code = server.wait()
    except KeyboardInterrupt:
        return
    raise RedisUnavailable(f"redis-server ended by itself with {code}")


def _folders(given: list[Path] | None, variable: str, default: str) -> list[Path]:
    if given:
        return given
    return [Path(part) for part in os.environ.get(variable, default).split(os.pathsep) if part]
