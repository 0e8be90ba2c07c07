"""The two Celery tasks: `trtq.serve`, which a bell calls, and `trtq.infer` for Celery clients."""

from __future__ import annotations

import base64
import logging
from typing import Any

import numpy as np
from celery import Celery, Task, current_task

from producer.errors import FileFormat, InvalidInput, WrongDtype
from producer.keys import INFER_TASK, SERVE_TASK, check_name
from producer.npy import read_array
from producer.quote import quoted
from workers.logs import logged_with
from workers.process import WorkerProcess

log = logging.getLogger("trtq.tasks")


def register(app: Celery, process: WorkerProcess) -> None:
    """Adds the tasks to `app`; they work on what `process` holds once the worker has started."""

    def serve(model: str, reason: str = "") -> dict[str, Any]:
        """One turn: claims, batches, runs and answers tasks of `model` until none is left."""
        try:
            name = check_name(model)
            with logged_with(model=name, turn_id=str(current_task.request.id)):
                return process.runtime.turn(name, reason)
        except BaseException as failure:
            log.exception("the turn on %s failed", quoted(model))
            return {"model": quoted(model), "error": f"{type(failure).__name__}: {failure}"}

    def infer(
        model: str,
        inputs: Any,
        priority: str = "normal",
        deadline: float | None = None,
    ) -> Any:
        """Runs `model` on nested lists or base64 .npy texts (a dict of them by input name).

        Returns nested lists (a dict of them for several outputs). Goes through the model's queue
        and batches as any other task; raises the same errors. In a chain or chord Celery puts the
        earlier result first, so `(inputs, model)` is understood too.
        """
        if isinstance(inputs, str) and not isinstance(model, str):
            model, inputs = inputs, model
        ticket = process.client.submit(
            model, from_plain(inputs), priority=priority, deadline=deadline
        )
        return to_plain(ticket.result())

    app.task(name=SERVE_TASK, ignore_result=True, acks_late=False)(serve)
    app.task(
        name=INFER_TASK, base=Task, acks_late=False, resultrepr_maxsize=200, argsrepr_maxsize=200
    )(infer)


def from_plain(inputs: Any) -> Any:
    """Lists as they are, texts as base64 of a .npy file, also in a dict by input name.

    Raises InvalidInput for other texts. Takes memory for the text's bytes, whatever they promise.
    """
    if isinstance(inputs, dict):
        return {name: _from_text(value) for name, value in inputs.items()}
    return _from_text(inputs)


def _from_text(value: Any) -> Any:
    if not isinstance(value, str | bytes):
        return value
    try:
        return read_array(base64.b64decode(value, validate=True), "the text")
    except (ValueError, FileFormat) as failure:
        raise InvalidInput(f"a text input must be a .npy file in base64: {failure}") from None


def to_plain(result: Any) -> Any:
    """Arrays as nested lists; raises WrongDtype for what is no array."""
    if isinstance(result, dict):
        return {name: to_plain(value) for name, value in result.items()}
    if isinstance(result, np.ndarray | np.generic):
        return result.tolist()
    raise WrongDtype(f"a result of type {type(result).__name__} has no plain form")
