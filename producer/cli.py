"""The command `trtq`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Annotated

import typer
from typer.core import TyperCommand

from producer.commands import bulk, dead, doctor, engines, operate, queues, serve, submit
from producer.commands.shared import CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    name="trtq",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Queue inference tasks, run them in batches, get the results.",
    epilog="Start with: trtq redis, then trtq worker, then trtq models.",
)


dead_app = typer.Typer(
    no_args_is_help=True, help="Look at tasks that were given up, put them back, or drop them."
)
app.add_typer(dead_app, name="dead")


def _show_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = metadata.version("trtq")
    except metadata.PackageNotFoundError:
        version = "of a source tree that is not installed"
    typer.echo(f"trtq {version}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


def _add(
    command: Callable[..., None],
    *examples: str,
    to: typer.Typer = app,
    name: str | None = None,
    cls: type[TyperCommand] = TyperCommand,
) -> None:
    # typer keeps the line breaks of a docstring's later paragraphs; terminals wrap better. A blank
    # line keeps lines of an epilog apart.
    text = [" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n")]
    epilog = "\n\n".join(("Example:", *examples))
    to.command(name, cls=cls, help="\n\n".join(text), epilog=epilog)(command)


_add(
    serve.worker,
    "trtq worker --devices 0,1 --models configs/models --bulk-root /data",
    cls=serve.WorkerCommand,
)
_add(bulk.bulk, "trtq bulk digits /data/rows.npy /data/scores.npy --resume")
_add(
    submit.submit,
    "trtq submit digits image.npy --output scores.npy",
    "echo '[[0.1, 0.2]]' | trtq submit small --priority high",
)
_add(submit.result, "trtq result cli.53c8d0e2a1b4-0")
_add(engines.build, "trtq build configs/models/digits.yaml")
_add(engines.inspect, "trtq inspect digits.plan --json")
_add(queues.models, "trtq models --redis-url redis://10.0.0.5:6379/0")
_add(queues.status, "trtq status --watch")
_add(queues.purge, "trtq purge digits --yes")
_add(
    doctor.doctor,
    "trtq doctor --seconds 10",
    "trtq doctor --model digits --run",
    "trtq doctor --metrics http://10.0.0.5:9461/metrics --json",
)
_add(dead.list_letters, "trtq dead list digits --json", to=dead_app, name="list")
_add(
    dead.show,
    "trtq dead show digits 1760000000000-0 --output inputs.npz",
    to=dead_app,
)
_add(dead.requeue, "trtq dead requeue digits 1760000000000-0", to=dead_app)
_add(dead.drop, "trtq dead drop digits --all --yes", to=dead_app)
_add(operate.exporter, "trtq exporter --port 9460")
_add(
    operate.acl,
    "trtq acl --admin root --worker gpu --producer web --passwords secrets --generate > users.acl",
)
_add(serve.redis, "trtq redis --port 6379 --dir ./redis-data")


def main() -> None:
    """The entry point of the command."""
    app()


if __name__ == "__main__":
    main()
