"""The command line: `trtq`."""

from __future__ import annotations

import typer

from producer.commands import bulk, operate, serve, submit

app = typer.Typer(
    name="trtq",
    help="Inference through Redis queues: serve models, submit tasks, look at the queues.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.command(epilog="Example: trtq worker --devices 0,1 --models configs/models --bulk-root /data")(
    serve.worker
)
app.command(epilog="Example: trtq bulk digits /data/images.npy /data/scores.npy --resume")(
    bulk.bulk
)
app.command(epilog="Example: trtq submit digits image.npy --priority high --output scores.npy")(
    submit.submit
)
app.command(epilog="Example: trtq models --redis-url redis://10.0.0.5:6379/0")(submit.models)
app.command(epilog="Example: trtq status --watch")(operate.status)
app.command(epilog="Example: trtq purge digits --yes")(operate.purge)
app.command("redis", epilog="Example: trtq redis --port 6379 --dir redis-data")(serve.redis_server)


def main() -> None:
    """Runs the command line; exits with its code."""
    app()


if __name__ == "__main__":
    main()
