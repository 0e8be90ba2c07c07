"""`trtq dead list`, `show`, `requeue` and `drop`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from producer.commands.shared import (
    EXIT_FAILED,
    AsJson,
    Model,
    RedisUrl,
    open_redis,
    producer_settings,
    show_error,
    stdout,
)
from producer.keys import PRIORITIES

if TYPE_CHECKING:
    from producer.dead import DeadLetters
    from producer.letters import DeadLetter
    from producer.task import InferenceTask

LetterId = Annotated[
    str, typer.Argument(metavar="ID", help="A letter's id or its task's, see `trtq dead list`.")
]
LetterIds = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Ids of letters or of their tasks.", show_default=False),
]
Every = Annotated[bool, typer.Option("--all", help="All dead letters of the model.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def list_letters(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Only this model's.", show_default="all")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most letters of each model.")] = 50,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """List dead letters, the newest first.

    A dead letter is a task that was given up without being run: several workers got it and none
    answered (poison_task), or it could not be read. Its sender was told.
    """
    from producer.dead import DeadLetters, models_with_letters

    with open_redis(redis_url) as connection:
        found: list[tuple[str, int, list[DeadLetter]]] = []
        for name in [model] if model else models_with_letters(connection):
            letters = DeadLetters(connection, name, producer_settings())
            letters.check()
            found.append((name, len(letters), list(letters.letters(limit))))
    if as_json:
        documents = [_document(name, letter) for name, _, some in found for letter in some]
        typer.echo(json.dumps(documents))
        return
    from producer.commands.tables import letters_table

    for name, held, some in found:
        if held > len(some):
            typer.echo(f"{name}: {len(some):,} of {held:,} dead letters", err=True)
    stdout().print(letters_table([(name, letter) for name, _, some in found for letter in some]))


def show(
    model: Model,
    letter_id: LetterId,
    output: Annotated[
        Path | None, typer.Option(help="Write the task's inputs to this .npz.")
    ] = None,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show one dead letter: why it died, who held it, and what its task holds."""
    from producer.errors import InvalidInput, TrtqError

    if output is not None and output.suffix != ".npz":
        raise InvalidInput(f"--output {str(output)!r}: use a name that ends in .npz")
    with _open_letters(redis_url, model) as letters:
        letter = letters.letter(letter_id)
        task, unreadable = None, ""
        try:
            task = letters.task(letter)
        except TrtqError as failure:
            if output is not None:
                raise
            unreadable = f"[{failure.code}] {failure.message}"
    if output is not None and task is not None:
        from producer.commands.arrays import write_tensors

        if task.reference is not None:
            raise InvalidInput("--output: the task's rows are in the files that it refers to")
        write_tensors(output, task.inputs)
        typer.echo(f"wrote {output}")
    document = {**_document(model, letter), **_contents(task, unreadable)}
    if as_json:
        typer.echo(json.dumps(document))
        return
    from producer.commands.tables import letter_table

    stdout().print(letter_table(document))


def requeue(
    model: Model,
    ids: LetterIds = None,
    every: Every = False,
    yes: Yes = False,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds from now in which the new task must be run.")
    ] = None,
    redis_url: RedisUrl = None,
) -> None:
    """Put dead tasks back into the queue, each as a new task.

    Prints the new task's id: its sender was already told that the old one is dead, so the result
    is kept for `trtq result` (TRTQ_STORE_S long). What cannot be requeued stays a dead letter.
    """
    from producer.errors import TrtqError

    failed = False
    with _open_letters(redis_url, model) as letters:
        chosen = _chosen(letters, ids, every)
        if every and not yes:
            typer.confirm(f"Requeue {len(chosen):,} dead tasks of {model}?", abort=True)
        for letter in chosen:
            try:
                typer.echo(letters.requeue(letter, deadline_s=deadline).task_id)
            except TrtqError as failure:
                show_error(failure.code, f"{letter.letter_id}: {failure.message}")
                failed = True
    if failed:
        raise typer.Exit(EXIT_FAILED)


def drop(
    model: Model,
    ids: LetterIds = None,
    every: Every = False,
    yes: Yes = False,
    redis_url: RedisUrl = None,
) -> None:
    """Remove dead letters for good."""
    with _open_letters(redis_url, model) as letters:
        chosen = _chosen(letters, ids, every)
        if every and not yes:
            typer.confirm(f"Drop {len(chosen):,} dead letters of {model}?", abort=True)
        dropped = letters.drop(chosen)
    typer.echo(f"{dropped:,} dead letters dropped")


@contextmanager
def _open_letters(redis_url: str | None, model: str) -> Iterator[DeadLetters]:
    from producer.dead import DeadLetters

    with open_redis(redis_url) as connection:
        letters = DeadLetters(connection, model, producer_settings())
        letters.check()
        yield letters


def _chosen(letters: DeadLetters, ids: list[str] | None, every: bool) -> list[DeadLetter]:
    from producer.errors import InvalidInput

    if every == bool(ids):
        raise InvalidInput("give ids of dead letters, or --all")
    if every:
        return list(letters.letters(newest=False))
    return list({(one := letters.letter(name)).letter_id: one for name in ids or ()}.values())


def _document(model: str, letter: DeadLetter) -> dict[str, Any]:
    facts = letter._asdict()
    return {
        "id": facts.pop("letter_id"),
        "model": model,
        **facts,
        "priority": PRIORITIES[letter.priority],
        "workers": list(letter.workers),
    }


def _contents(task: InferenceTask | None, unreadable: str) -> dict[str, Any]:
    """What the task holds, without its data."""
    if task is None:
        return {"unreadable": unreadable}
    if task.reference is None:
        return {
            "inputs": [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in task.inputs
            ]
        }
    reference = task.reference
    return {
        "reference": {
            "inputs": dict(reference.inputs),
            "outputs": dict(reference.outputs),
            "start": reference.start,
            "stop": reference.stop,
        }
    }
