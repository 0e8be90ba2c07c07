"""An engine whose outputs are not what was published: nobody gets them as a result."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from producer.errors import BY_CODE, EngineFailed
from producer.inbox import Entry
from producer.spec import ModelSpec, TensorSpec
from producer.task import InferenceTask, Reply, Tensor
from producer.wire import decode_replies
from tests.support.fake_engine import FakeEngine
from workers.batcher import Held
from workers.engines.base import Array
from workers.files import RowFiles
from workers.metrics import Counters
from workers.runner import BatchRunner
from workers.stages import Stages

X = TensorSpec(name="x", dtype="int64", shape=())
Y = TensorSpec(name="y", dtype="int64", shape=(2,))
FREE = TensorSpec(name="y", dtype="int64", shape=(None,))
BAD = 13


def replies(function: Callable[[Array], Array], output: TensorSpec, *values: int) -> list[Reply]:
    """What a batch of one-row tasks with these values is answered."""
    engine = FakeEngine(lambda inputs: {"y": function(inputs["x"])}, (X,), (Y,))
    engine.load()
    # The fake's slot takes any shape; what was published is the spec below.
    spec = ModelSpec(name="m", inputs=(X,), outputs=(output,), max_batch=8, max_rows_per_task=1)
    slot = engine.make_slot()
    slot.activate()
    runner = BatchRunner(
        engine, spec, RowFiles([]), Counters(), Stages(), lambda: time.monotonic() * 1000
    )
    batch = []
    for number, value in enumerate(values):
        data = np.array([value], np.int64).tobytes()
        task = InferenceTask(f"c-{number}", 1, (Tensor("x", "int64", (1,), data),))
        entry = Entry(1, b"%d-0" % number, b"", 1)
        batch.append(Held(entry, task, (("int64", ()),), 0.0, float("inf")))
    settlements = runner.run(slot, batch)
    slot.close()
    return [reply for one in settlements for reply in decode_replies(one.reply)]


def pairs(x: Array) -> Array:
    return np.stack([x, -x], axis=1)


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(lambda x: np.zeros((len(x), 3), np.int64), id="row shape"),
        pytest.param(lambda x: np.zeros((len(x), 2, 1), np.int64), id="rank"),
        pytest.param(lambda x: np.zeros((len(x) + 1, 2), np.int64), id="rows"),
    ],
)
def test_one_bad_task_fails_alone(nonsense: Callable[[Array], Array]) -> None:
    found = replies(lambda x: nonsense(x) if BAD in x else pairs(x), Y, 1, BAD, 2)
    assert [reply.task_id for reply in found] == ["c-0", "c-1", "c-2"]
    assert BY_CODE[found[1].error_code] is EngineFailed
    for reply, value in ((found[0], 1), (found[2], 2)):
        (tensor,) = reply.outputs
        assert np.frombuffer(tensor.data, np.int64).tolist() == [value, -value]


def test_a_dtype_that_was_not_published_fails() -> None:
    published = Y.model_copy(update={"dtype": "float64"})
    (reply,) = replies(pairs, published, 1)
    assert reply.error_code == "engine_failed"
    assert "int64" in reply.error_message
    assert "float64" in reply.error_message


def test_a_dynamic_dimension_takes_any_size() -> None:
    (reply,) = replies(pairs, FREE, 1)
    assert reply.outputs[0].shape == (1, 2)
