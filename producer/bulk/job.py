"""A bulk job: all rows of a file through a model, by reference, with a bounded number under way."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from producer.bulk import sources
from producer.bulk.journal import Journal
from producer.bulk.plan import ChunkPlan
from producer.bulk.run import BulkProgress, BulkRun, BulkSummary, ReferenceClient, RunOptions
from producer.bulk.sinks import ErrorList, OutputFiles
from producer.errors import BulkError, FileChanged, OutputMismatch, TrtqError
from producer.quote import quoted
from producer.spec import ModelSpec

#: Limits change no result. Everything else that is published, now or by a later release, is the
#: model's identity.
_LIMITS = frozenset(
    "max_rows_per_task max_task_bytes queue_max_rows queue_max_bytes cover_rows".split()
)


def run_bulk(
    client: ReferenceClient,
    model: str,
    input_path: Path | str,
    output_path: Path | str,
    *,
    window: int = 32,
    rows_per_task: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[BulkProgress], None] | None = None,
    priority: str = "low",
    deadline_s: float = 600.0,
    redis_patience_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> BulkSummary:
    """Runs every row of the input through `model`; the workers read and write the files.

    `input_path`: a .npy of shape (rows, *row shape) and exactly the model's dtype; a folder with
    `<input>.npy` for each input; or, for one input, a .parquet or .arrow file, which is converted
    to a temporary .npy beside the output. `output_path`: a .npy for one output, else a folder
    that gets `<output>.npy` for each. All lie inside the workers' allow-listed folders.

    `window` tasks of `rows_per_task` rows (default: the model's max_batch) are under way at once.
    `resume` goes on with an interrupted job, trying failed rows again, starts anew where there is
    no output yet, and runs nothing where the same job has ended without failed rows (`tasks` is 0
    and `resumed_rows` all rows then); `overwrite` replaces an existing output. `deadline_s` is one
    task's. Redis may be away for `redis_patience_s` seconds, counted from when that was noticed
    (within TRTQ_SPEC_TTL_S and a second). `progress` is called about once a task and once a
    second, in this thread.

    Beside the output lie `<output>.state`, which says what the job was and how far it is, and
    `<output>.errors.jsonl` ({"row", "code", "message"} a line) if rows failed; those rows are
    NaN, or 0 in outputs of integers. Failed rows raise nothing: look at `BulkSummary.failed`.

    Raises BulkError and its kinds, UnknownModel, WrongInputName, NoRows, MissingExtra before
    anything is sent; JobBusy; later the error that ended the job: a BulkError, RedisUnavailable,
    or KeyboardInterrupt. What was done by then can be resumed. A resume of a job that another
    model began raises OutputMismatch: the output would hold rows of both.
    """
    if window < 1:
        raise BulkError(f"window {window!r}: use 1 or more")
    if not redis_patience_s >= 0:
        raise BulkError(f"redis_patience_s {redis_patience_s!r}: use 0 or more seconds")
    if resume and overwrite:
        raise BulkError("resume and overwrite exclude each other")
    spec = client.spec(model)
    sources.check_rows_fixed(spec)
    rows_per_task = _rows_per_task(spec, rows_per_task)
    files = sources.input_files(spec, Path(input_path).resolve())
    output = OutputFiles(spec, Path(output_path).resolve())
    output.check_place()
    _check_distinct(files, output)
    with contextlib.ExitStack() as stack:
        journal = Journal(_beside(output.output, ".state"))
        stack.callback(journal.close)
        journal.open()
        recorded = journal.header()
        _check_existing(output, resume, overwrite, recorded)
        source = stack.enter_context(_opened(spec, files, output.output))
        header = _header(spec, source, rows_per_task or min(spec.max_batch, spec.max_rows_per_task))
        stack.callback(output.close)
        fresh = not (resume and recorded is not None and output.existing())
        if not fresh:
            assert recorded is not None
            header["rows_per_task"] = _check_recorded(recorded, header, rows_per_task, spec)
        plan = ChunkPlan(source.rows, header["rows_per_task"])
        if not fresh and len(output.existing()) == len(output.paths):
            output.reopen(source.rows)
            journal.replay(plan)
        else:
            _create(journal, header, output, source.rows)
        errors = ErrorList(_beside(output.output, ".errors.jsonl"))
        errors.begin()
        stack.callback(errors.close)
        options = RunOptions(
            window, priority, deadline_s, redis_patience_s, progress, fresh, clock, sleep
        )
        return BulkRun(client, spec, source, output, journal, plan, errors, options).run()


def _rows_per_task(spec: ModelSpec, wanted: int | None) -> int | None:
    if wanted is not None and not 1 <= wanted <= spec.max_rows_per_task:
        raise BulkError(
            f"rows_per_task {wanted!r}: model {spec.name!r} takes 1 to {spec.max_rows_per_task}"
        )
    return wanted


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(output.name + suffix)


def _check_distinct(files: dict[str, Path], output: OutputFiles) -> None:
    inputs = {path.resolve() for path in files.values()}
    for path in output.paths.values():
        if path.resolve() in inputs:
            raise OutputMismatch(f"{str(path)!r} is both input and output; name another output")


def _check_existing(
    output: OutputFiles, resume: bool, overwrite: bool, recorded: dict[str, Any] | None
) -> None:
    existing = output.existing()
    if not existing or overwrite:
        return
    if not resume:
        raise OutputMismatch(
            f"{str(existing[0])!r} exists: resume an interrupted job, overwrite it, or name "
            "another output"
        )
    if recorded is None:
        raise OutputMismatch(
            f"{str(existing[0])!r} has no job to resume ({output.output.name}.state is missing or "
            "unreadable): it is of other origin; overwrite it or name another output"
        )


def _create(journal: Journal, header: dict[str, Any], output: OutputFiles, rows: int) -> None:
    replaces = bool(output.existing())
    journal.begin(header)
    try:
        output.create(rows)
    except TrtqError:
        if not replaces:
            output.remove()
            journal.remove()
        raise


@contextlib.contextmanager
def _opened(spec: ModelSpec, files: dict[str, Path], output: Path) -> Iterator[sources.Source]:
    (path, *others) = files.values()
    if others or path.suffix not in sources.COLUMN_FORMATS:
        yield sources.open_npy(spec, files)
        return
    from producer.bulk import columns

    identity = [sources.identify(path)]
    converted = _beside(output, ".input.npy")
    try:
        columns.convert(spec, path, converted)
        source = sources.open_npy(spec, {spec.inputs[0].name: converted})
        yield source._replace(identity=identity)
    finally:
        converted.unlink(missing_ok=True)


def _header(spec: ModelSpec, source: sources.Source, rows_per_task: int) -> dict[str, Any]:
    return {
        "version": 2,
        "model": spec.name,
        "spec": spec.model_dump(mode="json", exclude=set(_LIMITS)),
        "inputs": source.identity,
        "rows": source.rows,
        "rows_per_task": rows_per_task,
    }


def _check_recorded(
    recorded: dict[str, Any], header: dict[str, Any], wanted: int | None, spec: ModelSpec
) -> int:
    """The recorded rows per task, if the recorded job is the one that is asked for now."""
    for key, error in (
        ("version", OutputMismatch),
        ("model", OutputMismatch),
        ("inputs", FileChanged),
        ("rows", FileChanged),
    ):
        if recorded.get(key) != header[key]:
            raise error(
                f"the recorded job had {key} {_shown(recorded.get(key))}, now it is "
                f"{_shown(header[key])}: it cannot be resumed; overwrite the output or name "
                "another"
            )
    _check_same_spec(spec.name, recorded.get("spec"), header["spec"])
    rows = recorded.get("rows_per_task")
    if type(rows) is not int or not 1 <= rows <= spec.max_rows_per_task:
        raise OutputMismatch(
            f"the recorded job had {quoted(rows)} rows a task, model {spec.name!r} takes 1 to "
            f"{spec.max_rows_per_task}: overwrite the output"
        )
    if wanted is not None and wanted != rows:
        raise BulkError(f"the recorded job has {rows} rows a task: resume it with as many")
    return rows


def _shown(value: Any) -> str:
    return json.dumps(value)[:500]


def _check_same_spec(model: str, recorded: Any, now: dict[str, Any]) -> None:
    if recorded == now:
        return
    before = recorded if isinstance(recorded, dict) else {}
    changes = [
        f"{key[:100]} was {_shown(before.get(key))}, now {_shown(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    raise OutputMismatch(
        f"model {model!r} has changed since the job began ({'; '.join(changes[:20])}) and the "
        "output would hold rows of both: serve the earlier one again and resume, or overwrite the "
        "output, or name another"
    )
