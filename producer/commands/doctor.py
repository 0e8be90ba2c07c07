"""`trtq doctor`: where the time goes, and what to change next."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from producer.commands.shared import (
    EXIT_FAILED,
    AsJson,
    RedisUrl,
    live_workers,
    open_client,
    open_redis,
    stdout,
)

if TYPE_CHECKING:
    import redis

    from producer.client import Client
    from producer.doctor.load import Load
    from producer.doctor.observation import Observation
    from producer.doctor.pages import Page
    from producer.spec import ModelSpec

_MOST_SECONDS = 600.0
_START_S = 30.0


def doctor(
    model: Annotated[
        str | None, typer.Option(help="This model alone.", show_default="all models")
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A worker's /metrics; repeat it for several.",
            show_default="what live workers publish",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.5, max=_MOST_SECONDS, help="How long to look.")
    ] = 10.0,
    run: Annotated[
        bool, typer.Option("--run", help="Make load: random inputs to --model, at low priority.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="With --run: rows in a task.")] = 1,
    in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="With --run: tasks under way.", show_default="two batches a slot"),
    ] = None,
    dynamic_size: Annotated[
        int, typer.Option(min=1, help="With --run: length of dynamic axes.")
    ] = 16,
    as_json: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show where a request's time goes, name the bottleneck, and say what to change next.

    Samples workers' metrics (start them with --metrics-port) and Redis. Needs the extra
    `metrics`.

    Exit code 0: healthy, no finding. 1: at least one finding, or nothing could be measured (then
    an error stands on stderr). 2: the request is wrong.
    """
    from producer.errors import InvalidInput, MissingExtra

    try:
        from producer.doctor.observation import observe
    except ImportError as failure:
        raise MissingExtra(
            f"trtq doctor needs prometheus-client ({failure}): pip install 'trtq[metrics]'"
        ) from failure
    if run and model is None:
        raise InvalidInput("--run makes load for one model: name it with --model")
    with open_redis(redis_url) as connection:
        urls = _urls(connection, metrics)
        strict = bool(metrics)
        if not run:
            seen = observe(connection, urls, seconds, strict=strict)
        else:
            assert model is not None
            with _load(connection, redis_url, urls, model, rows, in_flight, dynamic_size) as load:
                seen = observe(
                    connection, urls, seconds, strict=strict, makes_load=True, check=load.check
                )
    _report(seen, model, as_json=as_json)


def _urls(connection: redis.Redis, metrics: list[str] | None) -> list[str]:
    from producer.doctor.observation import discover
    from producer.doctor.pages import checked_url
    from producer.status import look

    if metrics:
        return list(dict.fromkeys(map(checked_url, metrics)))
    return discover(look(connection))


@contextmanager
def _load(
    connection: redis.Redis,
    redis_url: str | None,
    urls: list[str],
    model: str,
    rows: int,
    in_flight: int | None,
    dynamic_size: int,
) -> Iterator[Load]:
    """Load that is answered already."""
    from producer.doctor.load import Load
    from producer.doctor.observation import read_pages
    from producer.errors import InvalidInput

    if not live_workers(connection, model):
        raise InvalidInput(
            f"no live worker serves model {model!r}: start one (trtq worker); no load was made"
        )
    pages, _ = read_pages(urls, time.monotonic, strict=False)
    with open_client(redis_url) as client:
        spec = client.spec(model)
        window = in_flight or _window(client, spec, pages, rows, dynamic_size)
        load = Load(
            client,
            spec,
            rows=rows,
            in_flight=window,
            most_s=_MOST_SECONDS + _START_S,
            dynamic_size=dynamic_size,
        )
        load.start()
        try:
            load.wait_running(_START_S)
            yield load
        finally:
            load.close()
        for code, message in load.errors.items():
            typer.secho(f"tasks failed [{code}]: {message}", fg=typer.colors.YELLOW, err=True)


def _window(
    client: Client, spec: ModelSpec, pages: list[Page], rows: int, dynamic_size: int
) -> int:
    import numpy as np

    from producer.doctor.load import default_in_flight, random_inputs

    serving = [page for page in pages if spec.name in page.models]
    slots = max((page.value("trtq_slots", model=spec.name) or 1.0 for page in serving), default=1.0)
    one = random_inputs(spec, 1, dynamic_size, np.random.default_rng(0))
    size = sum(array.nbytes for array in one.values())
    return max(1, math.ceil(default_in_flight(spec, slots, len(serving), size) / rows))


def _report(seen: Observation, model: str | None, *, as_json: bool) -> None:
    from producer.commands.diagnosis import Diagnosis, diagnosis_view
    from producer.doctor.measures import measure, models
    from producer.doctor.rules import judge
    from producer.errors import UnknownModel

    known = models(seen)
    if model is not None and model not in known:
        raise UnknownModel(f"no page and no queue knows model {model!r}; there are {known}")
    names = known if model is None else [model]
    diagnoses = []
    for name in names:
        measured = measure(seen, name)
        diagnoses.append(Diagnosis(name, measured, judge(measured.measures)))
    healthy = not any(one.findings for one in diagnoses)
    if as_json:
        document = {
            "healthy": healthy,
            "seconds": seen.seconds,
            "pages": [page.url for page in seen.after],
            "pages_missing": seen.missing,
            "models": {one.model: one.as_document() for one in diagnoses},
        }
        typer.echo(json.dumps(document))
    else:
        stdout().print(diagnosis_view(diagnoses, seen.seconds))
        for url in seen.missing:
            typer.secho(f"not read: {url}", fg=typer.colors.YELLOW, err=True)
    if healthy and not seen.after:
        typer.secho(
            "error: nothing was measured, no worker shows its metrics: start one with "
            "--metrics-port",
            fg=typer.colors.RED,
            err=True,
        )
        raise typer.Exit(EXIT_FAILED)
    raise typer.Exit(0 if healthy else EXIT_FAILED)
