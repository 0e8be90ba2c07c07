"""Which messages in Celery's queues are calls that a worker runs: whoever rings may write there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

from kombu.exceptions import ContentDisallowed, DecodeError
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from producer.errors import CorruptMessage
from producer.keys import INFER_QUEUE, INFER_TASK, SERVE_TASK
from producer.quote import one_line, quoted

#: Arguments, keyword arguments, and what is called afterwards: the body in Celery's protocol 2.
Call: TypeAlias = tuple[list[Any], dict[str, Any], dict[str, Any] | None]

_CALL: TypeAdapter[Call] = TypeAdapter(Call)
_UNREADABLE = (ContentDisallowed, DecodeError, RecursionError, ValueError, LookupError, TypeError)


class CallHeaders(BaseModel):
    """The headers of Celery's protocol 2 on which a worker relies."""

    task: str
    id: str = Field(min_length=1)
    eta: str | None = None
    expires: str | None = None
    retries: int | None = Field(default=None, ge=0)
    timelimit: tuple[float | None, float | None] | None = None


def accepted_tasks(queues: Collection[str]) -> frozenset[str]:
    """The tasks that a worker of these queues runs."""
    return frozenset(INFER_TASK if queue == INFER_QUEUE else SERVE_TASK for queue in queues)


def check_message(message: Any, accepted: Collection[str]) -> None:
    """Raises CorruptMessage for a kombu message that is no well-formed call of these tasks."""
    try:
        headers = CallHeaders.model_validate(message.headers)
        _, _, then = _CALL.validate_python(message.payload)
    except ValidationError as failure:
        wrong = failure.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"])) or "it"
        raise CorruptMessage(f"no call of a Celery task: {place}: {wrong['msg']}") from None
    except _UNREADABLE as failure:
        text = one_line(f"{type(failure).__name__}: {failure}")
        raise CorruptMessage(f"a body that cannot be read ({text})") from None
    if headers.task not in accepted:
        raise CorruptMessage(
            f"a call of task {quoted(headers.task)}; this worker runs {', '.join(sorted(accepted))}"
        )
    if headers.task == SERVE_TASK and (headers.eta or any((then or {}).values())):
        raise CorruptMessage("a bell that asks for more than a turn")
