import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.bulk import BulkProgress, BulkSummary, run_bulk
from producer.bulk import run as bulk_run
from producer.bulk.journal import Journal
from producer.bulk.plan import ChunkPlan
from producer.errors import (
    BulkError,
    EngineFailed,
    FileChanged,
    FileFormat,
    FileMissing,
    JobBusy,
    MissingExtra,
    NoRows,
    OutputFailed,
    OutputMismatch,
    PathNotAllowed,
    RedisUnavailable,
    TrtqError,
    UnknownModel,
    WrongInputName,
)
from producer.spec import ModelSpec, TensorSpec
from producer.task import RowError, RowReference
from tests.support.references import ThreadClient

ROWS = 103
ONE = ModelSpec(
    name="double",
    inputs=(TensorSpec(name="x", dtype="float32", shape=(3,)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=(3,)),),
    max_batch=8,
    max_rows_per_task=16,
)
TWO = ModelSpec(
    name="pair",
    inputs=(
        TensorSpec(name="a/0", dtype="float32", shape=(3,)),
        TensorSpec(name="b", dtype="int64", shape=()),
    ),
    outputs=(
        TensorSpec(name="sum", dtype="float32", shape=(3,)),
        TensorSpec(name="twice", dtype="int64", shape=()),
    ),
    max_batch=8,
    max_rows_per_task=16,
)


def double(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"y": arrays["x"] * 2}


def pair(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"sum": arrays["a/0"] + arrays["b"][:, None].astype("f4"), "twice": arrays["b"] * 2}


class Place:
    """A folder that the workers may use, with an input of ROWS rows, and clients for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.input = root / "in.npy"
        self.output = root / "out.npy"
        self.state = root / "out.npy.state"
        self.errors = root / "out.npy.errors.jsonl"
        self.rows = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
        np.save(self.input, self.rows)
        self.clients: list[ThreadClient] = []

    def client(self, spec: ModelSpec = ONE, run: Any = double, **options: Any) -> ThreadClient:
        client = ThreadClient(spec, [self.root], run, **options)
        self.clients.append(client)
        return client

    def bulk(self, client: ThreadClient | None = None, **options: Any) -> BulkSummary:
        return run_bulk(client or self.client(), "double", self.input, self.output, **options)

    def listed(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.errors.read_text().splitlines()]

    def names(self) -> set[str]:
        return set(os.listdir(self.root))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    root = tmp_path / "root"
    root.mkdir()
    place = Place(root)
    yield place
    for client in place.clients:
        client.close()


def interrupt_after(tasks: int) -> Callable[[BulkProgress], None]:
    def progress(now: BulkProgress) -> None:
        if now.rows_done - now.resumed_rows >= 8 * tasks:
            raise KeyboardInterrupt

    return progress


def test_a_whole_job(place: Place) -> None:
    client = place.client()
    seen: list[BulkProgress] = []
    summary = place.bulk(client, window=4, progress=seen.append)
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)
    assert (summary.rows, summary.failed, summary.tasks, summary.resumed_rows) == (ROWS, 0, 13, 0)
    assert summary.output_paths == (place.output,)
    assert summary.errors_path is None
    assert summary.rows_per_s > 0
    assert place.names() == {"in.npy", "out.npy", "out.npy.state"}
    assert sorted((r.start, r.stop) for r in client.submitted) == [
        (start, min(start + 8, ROWS)) for start in range(0, ROWS, 8)
    ]
    assert client.most_under_way <= 4
    assert seen[0].rows_done == 0
    assert seen[-1][:3] == (ROWS, ROWS, 0)
    assert [p.rows_done for p in seen] == sorted(p.rows_done for p in seen)


def test_rows_per_task(place: Place) -> None:
    assert place.bulk(rows_per_task=16).tasks == 7
    for bad in (0, 17):
        with pytest.raises(BulkError, match="takes 1 to 16"):
            place.bulk(rows_per_task=bad, overwrite=True)
    with pytest.raises(BulkError, match="window"):
        place.bulk(window=0)
    with pytest.raises(BulkError, match="exclude"):
        place.bulk(resume=True, overwrite=True)


def test_several_inputs_and_outputs(place: Place) -> None:
    folder, out = place.root / "ins", place.root / "outs"
    folder.mkdir()
    numbers = np.arange(ROWS)
    np.save(folder / "a_0.npy", place.rows)
    client = place.client(TWO, pair)
    with pytest.raises(FileMissing, match=r"b\.npy"):
        run_bulk(client, "pair", folder, out)
    np.save(folder / "b.npy", numbers[:-1])
    with pytest.raises(FileFormat, match="102 rows"):
        run_bulk(client, "pair", folder, out)
    np.save(folder / "b.npy", numbers)
    with pytest.raises(WrongInputName, match=r"a_0\.npy, b\.npy"):
        run_bulk(client, "pair", place.input, out)
    with pytest.raises(OutputMismatch, match="need a folder"):
        run_bulk(client, "pair", folder, place.input)
    summary = run_bulk(client, "pair", folder, out)
    assert summary.output_paths == (out / "sum.npy", out / "twice.npy")
    np.testing.assert_array_equal(np.load(out / "sum.npy"), place.rows + numbers[:, None])
    np.testing.assert_array_equal(np.load(out / "twice.npy"), numbers * 2)
    with pytest.raises(OutputMismatch, match="exists"):
        run_bulk(client, "pair", folder, out)


def test_inputs_that_cannot_be(place: Place) -> None:
    client = place.client()

    def refused(error: type[TrtqError], match: str, **options: Any) -> None:
        before = place.names()
        with pytest.raises(error, match=match):
            place.bulk(client, **options)
        assert place.names() == before
        assert not client.submitted

    for array in (place.rows.astype("f8"), place.rows[:, :2], place.rows[:, 0]):
        np.save(place.input, array)
        refused(FileFormat, "takes float32")
    np.save(place.input, np.asfortranarray(place.rows))
    refused(FileFormat, "Fortran")
    np.save(place.input, place.rows[:0])
    refused(NoRows, "no rows")
    np.save(place.input, place.rows)
    os.truncate(place.input, 500)
    refused(FileFormat, "cut off")
    place.input.unlink()
    refused(FileMissing, "does not exist")
    with pytest.raises(UnknownModel, match="known: double"):
        run_bulk(client, "none", place.input, place.output)


def test_outputs_that_cannot_be(place: Place) -> None:
    client = place.client()
    for output, error, match in (
        (place.root / "none" / "out.npy", FileMissing, "create it first"),
        (place.root, OutputMismatch, "is a folder"),
        (place.root / "out.csv", BulkError, r"are \.npy"),
        (place.input, OutputMismatch, "both input and output"),
    ):
        with pytest.raises(error, match=match):
            run_bulk(client, "double", place.input, output, overwrite=True)
    np.save(place.output, place.rows)
    with pytest.raises(OutputMismatch, match="exists"):
        place.bulk(client)
    with pytest.raises(OutputMismatch, match="no job to resume"):
        place.bulk(client, resume=True)
    assert not client.submitted
    assert place.names() == {"in.npy", "out.npy"}
    np.testing.assert_array_equal(np.load(place.input), place.rows)
    np.testing.assert_array_equal(np.load(place.output), place.rows)
    place.bulk(client, overwrite=True)
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)


def test_an_output_larger_than_the_disk(place: Place) -> None:
    huge = TensorSpec(name="y", dtype="float32", shape=(1 << 50,))
    with pytest.raises(OutputFailed, match="its disk has"):
        place.bulk(place.client(ONE.model_copy(update={"outputs": (huge,)})))
    assert place.names() == {"in.npy"}


def test_dynamic_rows_are_refused(place: Place) -> None:
    dynamic = (TensorSpec(name="y", dtype="float32", shape=(None,)),)
    for field in ("inputs", "outputs"):
        with pytest.raises(BulkError, match=r"Client\.map"):
            place.bulk(place.client(ONE.model_copy(update={field: dynamic})))


def test_a_path_that_the_workers_refuse(place: Place, tmp_path: Path) -> None:
    client = place.client()
    np.save(tmp_path / "in.npy", place.rows)
    with pytest.raises(PathNotAllowed, match="TRTQ_BULK_ROOTS"):
        run_bulk(client, "double", tmp_path / "in.npy", place.output)
    # Nothing was done, so nothing is left in the way of a second try.
    assert place.names() == {"in.npy"}
    (place.root / "link.npy").symlink_to(tmp_path / "in.npy")
    with pytest.raises(PathNotAllowed):
        run_bulk(client, "double", place.root / "link.npy", place.output)
    with pytest.raises(PathNotAllowed):
        run_bulk(client, "double", place.input, tmp_path / "out.npy")


def test_resume_gives_the_same_bytes(place: Place) -> None:
    place.bulk()
    whole = place.output.read_bytes()
    place.output.unlink()
    with pytest.raises(KeyboardInterrupt):
        place.bulk(window=2, progress=interrupt_after(5))
    assert place.state.exists()
    assert place.output.read_bytes() != whole
    second = place.client()
    summary = place.bulk(second, resume=True)
    assert place.output.read_bytes() == whole
    assert 32 <= summary.resumed_rows < ROWS
    assert summary.tasks == -(-(ROWS - summary.resumed_rows) // 8)


def test_resume_of_a_finished_job_runs_nothing(place: Place) -> None:
    place.bulk()
    whole, state = place.output.read_bytes(), place.state.read_bytes()
    assert state.endswith(b"}\nfinished\n")
    for _ in range(2):
        summary = place.bulk(resume=True)
        assert (summary.rows, summary.tasks, summary.failed) == (ROWS, 0, 0)
        assert summary.resumed_rows == ROWS
        assert place.output.read_bytes() == whole
        assert place.state.read_bytes() == state
    # A crash while the state was shortened leaves lines behind its end.
    place.state.write_bytes(state + b"one 3\nsync\n")
    assert place.bulk(resume=True).tasks == 0
    np.save(place.input, place.rows + 1)
    with pytest.raises(FileChanged, match="cannot be resumed"):
        place.bulk(resume=True)
    assert place.bulk(overwrite=True).tasks == 13


def test_a_state_that_is_no_file(place: Place) -> None:
    os.mkfifo(place.state)
    with pytest.raises(OutputFailed, match="no regular file"):
        place.bulk()
    place.state.unlink()
    place.state.mkdir()
    with pytest.raises(OutputFailed):
        place.bulk()


def test_resume_where_nothing_is_starts_anew(place: Place) -> None:
    assert place.bulk(resume=True).resumed_rows == 0
    place.output.unlink()
    with pytest.raises(KeyboardInterrupt):
        place.bulk(progress=interrupt_after(4))
    place.output.unlink()
    assert place.bulk(resume=True).resumed_rows == 0
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)


def test_resume_of_another_job_is_refused(place: Place) -> None:
    with pytest.raises(KeyboardInterrupt):
        place.bulk(progress=interrupt_after(4))
    other = ONE.model_copy(update={"inputs": (ONE.inputs[0].model_copy(update={"name": "z"}),)})
    with pytest.raises(OutputMismatch, match=r"'double' has changed .*inputs was"):
        place.bulk(place.client(other), resume=True)
    with pytest.raises(BulkError, match="8 rows a task"):
        place.bulk(resume=True, rows_per_task=4)
    small = ONE.model_copy(update={"max_rows_per_task": 4})
    with pytest.raises(OutputMismatch, match="1 to 4"):
        place.bulk(place.client(small), resume=True)
    kept = place.output.read_bytes()
    np.save(place.output, place.rows[:5])
    with pytest.raises(OutputMismatch, match="this job writes"):
        place.bulk(resume=True)
    place.output.write_bytes(kept[:200])
    with pytest.raises(OutputMismatch, match="cut off"):
        place.bulk(resume=True)
    place.output.write_bytes(kept)
    np.save(place.input, place.rows + 1)
    with pytest.raises(FileChanged, match="cannot be resumed"):
        place.bulk(resume=True)


def test_resume_after_the_model_changed_is_refused(place: Place) -> None:
    with pytest.raises(KeyboardInterrupt):
        place.bulk(progress=interrupt_after(4))
    state, output = place.state.read_bytes(), place.output.read_bytes()
    for change, text in (
        ({"max_batch": 4}, "max_batch was 8, now 4"),
        ({"forbid_nan": True}, "forbid_nan was false, now true"),
    ):
        with pytest.raises(OutputMismatch, match=text) as caught:
            place.bulk(place.client(ONE.model_copy(update=change)), resume=True)
        assert "overwrite" in caught.value.message
        assert place.state.read_bytes() == state
        assert place.output.read_bytes() == output
    # Larger limits are the same model; what the refusals left can still be resumed.
    wider = ONE.model_copy(update={"queue_max_rows": 7, "cover_rows": 9, "max_task_bytes": 99})
    assert place.bulk(place.client(wider), resume=True).resumed_rows >= 32
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)


def test_whatever_else_is_published_is_the_models_identity(place: Place) -> None:
    class Published(ModelSpec):
        digest: str

    def served(digest: str) -> ThreadClient:
        return place.client(Published(**ONE.model_dump(), digest=digest))

    with pytest.raises(KeyboardInterrupt):
        place.bulk(served("one"), progress=interrupt_after(4))
    with pytest.raises(OutputMismatch, match='digest was "one", now "two"'):
        place.bulk(served("two"), resume=True)
    assert place.bulk(served("one"), resume=True).resumed_rows >= 32


def test_a_state_of_an_earlier_release_is_refused(place: Place) -> None:
    with pytest.raises(KeyboardInterrupt):
        place.bulk(progress=interrupt_after(4))
    header, _, rest = place.state.read_bytes().partition(b"\n")
    old = {**json.loads(header), "version": 1, "spec": "0f3c"}
    place.state.write_bytes(json.dumps(old).encode() + b"\n" + rest)
    with pytest.raises(OutputMismatch, match="version 1, now it is 2"):
        place.bulk(resume=True)


def test_a_torn_state_is_resumed(place: Place) -> None:
    place.bulk()
    whole = place.output.read_bytes()
    place.output.unlink()
    with pytest.raises(KeyboardInterrupt):
        place.bulk(window=2, progress=interrupt_after(6))
    lines = place.state.read_bytes().splitlines(keepends=True)
    done = [line for line in lines if line.startswith(b"done")]
    for tail in (b"done 1", b"\0\0\0\n", b"done 999\n", b"done x\ndone 0\n"):
        place.state.write_bytes(b"".join(lines) + tail)
        with pytest.raises(KeyboardInterrupt):
            place.bulk(resume=True, progress=interrupt_after(0))
        assert place.state.read_bytes().startswith(b"".join(lines) + b"boot ")
    summary = place.bulk(resume=True)
    assert summary.resumed_rows >= 8 * (len(done) - 1) + 7
    assert place.output.read_bytes() == whole


def test_an_unreadable_header_is_no_job(place: Place) -> None:
    with pytest.raises(KeyboardInterrupt):
        place.bulk(progress=interrupt_after(4))
    for text in ('{"version": 1', "[]\n", "\0\n", "[" * 200_000 + "\n"):
        place.state.write_text(text)
        with pytest.raises(OutputMismatch, match="no job to resume"):
            place.bulk(resume=True)


def test_two_jobs_on_one_output(place: Place) -> None:
    seen: list[int] = []

    def second(_: BulkProgress) -> None:
        if not seen:
            seen.append(1)
            for resume, overwrite in ((False, False), (True, False), (False, True)):
                with pytest.raises(JobBusy, match="another bulk job"):
                    place.bulk(resume=resume, overwrite=overwrite)

    assert place.bulk(progress=second).failed == 0
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)


def test_failed_rows_are_listed_and_tried_again(place: Place) -> None:
    def check(reference: RowReference) -> list[RowError]:
        if reference.start == 16:
            raise EngineFailed("the whole chunk")
        return [
            RowError(row, "forbidden_nan", f"row {row}")
            for row in (3, 5, 102)
            if reference.start <= row < reference.stop
        ]

    summary = place.bulk(place.client(check=check))
    assert (summary.rows, summary.failed, summary.errors_path) == (ROWS, 11, place.errors)
    bad = [3, 5, *range(16, 24), 102]
    listed = sorted(place.listed(), key=lambda line: int(line["row"]))
    assert [line["row"] for line in listed] == bad
    assert listed[0] == {"row": 3, "code": "forbidden_nan", "message": "row 3"}
    assert listed[2] == {"row": 16, "code": "engine_failed", "message": "the whole chunk"}
    output = np.load(place.output)
    assert np.flatnonzero(np.isnan(output).all(axis=1)).tolist() == bad
    good = np.setdiff1d(np.arange(ROWS), bad)
    np.testing.assert_array_equal(output[good], place.rows[good] * 2)

    still = place.bulk(
        place.client(check=lambda r: [RowError(5, "forbidden_nan", "")] if r.start == 0 else []),
        resume=True,
    )
    assert (still.failed, still.tasks, still.resumed_rows) == (1, 3, ROWS - 8 - 8 - 7)
    assert [line["row"] for line in place.listed()] == [5]

    last = place.bulk(resume=True)
    assert (last.failed, last.tasks) == (0, 1)
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)
    assert place.names() == {"in.npy", "out.npy", "out.npy.state"}


def test_a_fatal_error_keeps_what_is_done(place: Place) -> None:
    def check(reference: RowReference) -> list[RowError]:
        if reference.start == 48:
            raise OutputFailed("disk full")
        return []

    with pytest.raises(OutputFailed, match="disk full"):
        place.bulk(place.client(check=check), window=3)
    assert place.state.exists()
    summary = place.bulk(resume=True)
    assert summary.resumed_rows >= 32
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)


def test_an_input_cut_off_in_the_middle(place: Place) -> None:
    def check(reference: RowReference) -> list[RowError]:
        if reference.start == 40:
            os.truncate(place.input, 600)
        return []

    with pytest.raises(FileChanged):
        place.bulk(place.client(check=check, threads=1))


def test_an_input_changed_in_the_middle(place: Place) -> None:
    def check(reference: RowReference) -> list[RowError]:
        if reference.start == 40:
            np.save(place.root / "new.npy", place.rows + 1)
            os.replace(place.root / "new.npy", place.input)
        return []

    with pytest.raises(FileChanged, match="may mix"):
        place.bulk(place.client(check=check))
    with pytest.raises(FileChanged):
        place.bulk(resume=True)


def test_redis_away_for_a_while(place: Place) -> None:
    refusals = iter(range(1000))
    naps: list[float] = []

    def refuse(_: RowReference) -> None:
        if 3 <= next(refusals) < 8:
            raise RedisUnavailable("gone")

    failures = iter(range(1000))

    def check(_: RowReference) -> list[RowError]:
        if next(failures) < 3:
            raise RedisUnavailable("gone in mid-flight")
        return []

    summary = place.bulk(place.client(refuse=refuse, check=check), sleep=naps.append)
    assert (summary.failed, summary.tasks) == (0, 16)
    assert naps[:5] == [0.1, 0.2, 0.4, 0.8, 1.6]
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)


def test_a_chunk_that_never_gets_through_fails_alone(place: Place) -> None:
    def check(reference: RowReference) -> list[RowError]:
        if reference.start == 0:
            raise RedisUnavailable("gone")
        return []

    summary = place.bulk(place.client(check=check), sleep=lambda _: None)
    assert (summary.failed, summary.tasks) == (8, 15)
    assert {line["code"] for line in place.listed()} == {"redis_unavailable"}


def test_redis_away_for_good(place: Place) -> None:
    time_s = [0.0]

    def nap(seconds: float) -> None:
        time_s[0] += seconds

    def refuse(reference: RowReference) -> None:
        if reference.start >= 16:
            client.wait_idle()
            raise RedisUnavailable("gone")

    client = place.client(refuse=refuse)
    with pytest.raises(RedisUnavailable, match=r"after 30 s without Redis: gone; .*--resume"):
        place.bulk(client, sleep=nap, clock=lambda: time_s[0])
    assert 30 <= time_s[0] < 36
    assert place.bulk(resume=True).resumed_rows == 16


class Silent(ThreadClient):
    """Answers the first chunk only. Then each question for the spec takes 10 s and may fail."""

    def __init__(self, place: Place, outages: tuple[bool, ...]) -> None:
        super().__init__(ONE, [place.root], double, threads=1)
        self.now_s = 0.0
        self.outages = iter(outages)
        self.answered = threading.Event()
        place.clients.append(self)

    def spec(self, model: str) -> ModelSpec:
        if self.submitted:
            assert self.answered.wait(20)
            self.now_s += 10
            if next(self.outages, True):
                raise RedisUnavailable("Redis at redis://:***@h/0 does not answer")
        return super().spec(model)

    def _execute(self, ticket: Any, reference: RowReference) -> None:
        if reference.start == 0:
            super()._execute(ticket, reference)
            self.answered.set()


@pytest.mark.parametrize(
    ("outages", "end_s"),
    # Noticed at 10 s, long before the tasks' deadline; a second outage is counted anew.
    [((), 60), ((True, True, False), 90), ((False, False), 80)],
)
def test_redis_gone_for_good_while_the_job_waits_for_answers(
    place: Place, monkeypatch: pytest.MonkeyPatch, outages: tuple[bool, ...], end_s: float
) -> None:
    monkeypatch.setattr(bulk_run, "_TICK_S", 0.0)
    monkeypatch.setattr(bulk_run, "_SHORT_DRAIN_S", 0.0)
    client = Silent(place, outages)
    with pytest.raises(RedisUnavailable) as caught:
        place.bulk(client, redis_patience_s=50, clock=lambda: client.now_s)
    assert "50 s without Redis: Redis at redis://:***@h/0" in caught.value.message
    assert "--resume" in caught.value.message
    assert client.now_s == end_s
    assert place.bulk(resume=True).resumed_rows == 8
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)


def test_redis_gone_before_anything_is_done_can_be_resumed(place: Place) -> None:
    def refuse(_: RowReference) -> None:
        raise RedisUnavailable("gone")

    with pytest.raises(RedisUnavailable, match="after 0 s"):
        place.bulk(place.client(refuse=refuse), redis_patience_s=0)
    assert place.state.exists()
    assert place.bulk(resume=True).resumed_rows == 0
    np.testing.assert_array_equal(np.load(place.output), place.rows * 2)
    for patience_s in (-1.0, float("nan")):
        with pytest.raises(BulkError, match="redis_patience_s"):
            place.bulk(overwrite=True, redis_patience_s=patience_s)


def test_lines_of_an_earlier_boot_count_up_to_the_last_sync(tmp_path: Path) -> None:
    def reopened(boot: str) -> tuple[Journal, ChunkPlan]:
        journal, plan = Journal(tmp_path / "state", boot), ChunkPlan(100, 10)
        journal.open()
        journal.replay(plan)
        return journal, plan

    first = Journal(tmp_path / "state", "one")
    first.open()
    first.begin({"job": 1})
    first.done(1)
    first.sync()
    first.done(2)
    first.close()
    again, plan = reopened("one")
    assert list(plan.pending()) == [0, 3, 4, 5, 6, 7, 8, 9]
    again.done(3)
    again.close()
    rebooted, plan = reopened("two")
    assert list(plan.pending()) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    rebooted.sync()
    rebooted.close()
    third, plan = reopened("three")
    assert plan.done_rows == 10
    assert third.header() == {"job": 1}
    third.close()


@given(st.integers(1, 500), st.integers(1, 40), st.sets(st.integers(0, 499)))
def test_plan_covers_every_row_once(rows: int, per_task: int, done: set[int]) -> None:
    plan = ChunkPlan(rows, per_task)
    done = {chunk for chunk in done if chunk < plan.chunks}
    for chunk in [*done, *done]:
        plan.mark_done(chunk)
    ranges = [plan.range(chunk) for chunk in range(plan.chunks)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == rows
    assert all(
        a[1] == b[0] and a[0] < a[1] <= a[0] + per_task for a, b in itertools.pairwise(ranges)
    )
    assert set(plan.pending()) == set(range(plan.chunks)) - done
    assert plan.done_rows == sum(b - a for a, b in (ranges[chunk] for chunk in done))


def test_parquet_and_arrow(place: Place) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    flat = pa.array(place.rows.reshape(-1))
    lists = pa.FixedSizeListArray.from_arrays(flat, 3)
    columns = {name: place.rows[:, i] for i, name in enumerate("abc")}
    for name, table in (
        ("list.parquet", pa.table({"id": np.arange(ROWS), "x": lists})),
        ("only.parquet", pa.table({"v": lists.cast(pa.list_(pa.float32()))})),
        ("columns.parquet", pa.table(columns)),
        ("columns.arrow", pa.table(columns)),
    ):
        place.input = place.root / name
        if name.endswith("parquet"):
            pq.write_table(table, place.input)
        else:
            with pa.ipc.new_file(place.input, table.schema) as file:
                file.write_table(table, 10)
        assert place.bulk(overwrite=True).rows == ROWS
        np.testing.assert_array_equal(np.load(place.output), place.rows * 2)
    assert not [name for name in place.names() if "input" in name]
    for table, match in (
        (pa.table({"x": lists.cast(pa.list_(pa.float64()))}), "double"),
        (pa.table({"a": place.rows[:, 0]}), "1 columns"),
        (pa.table({"x": pa.array([[1.0, 2.0]], pa.list_(pa.float32()))}), "3 elements"),
        (pa.table({**columns, "c": pa.array([None] * ROWS, pa.float32())}), "nulls"),
    ):
        pq.write_table(table, place.root / "bad.parquet")
        place.input = place.root / "bad.parquet"
        with pytest.raises(FileFormat, match=match):
            place.bulk(overwrite=True)
    twice = pa.Table.from_arrays([lists, lists], ["x", "x"])
    pq.write_table(twice, place.input)
    with pytest.raises(FileFormat, match="2 columns named 'x'"):
        place.bulk(overwrite=True)
    place.input.write_bytes(b"no parquet")
    with pytest.raises(FileFormat, match="cannot be read"):
        place.bulk(overwrite=True)


def test_a_parquet_file_that_lies_about_its_rows(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    place.input = place.root / "in.parquet"
    pq.write_table(pa.table({name: place.rows[:, i] for i, name in enumerate("abc")}), place.input)
    for said, match in ((ROWS + 1, f"it has {ROWS}"), (ROWS - 1, "more than the 102 rows")):
        monkeypatch.setattr("producer.bulk.columns._rows", lambda _, said=said: said)
        with pytest.raises(FileFormat, match=match):
            place.bulk()
    assert place.names() == {"in.npy", "in.parquet"}


def test_a_damaged_parquet_file_is_the_inputs_fault(place: Place) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    place.input = place.root / "in.parquet"
    pq.write_table(pa.table({name: place.rows[:, i] for i, name in enumerate("abc")}), place.input)
    whole = place.input.read_bytes()
    place.input.write_bytes(whole[:4] + b"\xff" * 400 + whole[404:])
    with pytest.raises(FileFormat, match="cannot be read"):
        place.bulk()
    assert place.names() == {"in.npy", "in.parquet"}


def test_parquet_without_pyarrow(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.input = place.root / "in.parquet"
    place.input.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"trtq\[bulk\]"):
        place.bulk()
    assert place.names() == {"in.npy", "in.parquet"}
