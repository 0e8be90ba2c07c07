"""Model configurations: one YAML file a model, checked before anything is loaded."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from producer.errors import ConfigError, ModelConflict
from producer.keys import check_name
from producer.limits import RateLimit
from producer.quote import printable, quoted
from producer.spec import MAX_COUNT, MAX_TENSORS, ModelSpec
from workers.engines.base import EngineSpec
from workers.engines.hook_options import PostprocessOptions, PreprocessOptions
from workers.tensorrt.options import BuildOptions

#: Slots where the file names none: on a GPU, copies of one overlap the compute of another.
_DEFAULT_SLOTS = {"onnxruntime": 1, "tensorrt": 4}


_MOST_ROWS = 2**31 - 1
#: Below, a worker that only waits for a CPU core for a moment would be replaced.
_LEAST_TIMEOUT_S = 0.1
_MOST_TIMEOUT_S = 86_400
#: A configuration has some hundred bytes, one with many profiles some thousand.
_MOST_BYTES = 16 << 10
_MOST_LEVELS = 20
_MOST_PARTS = 10


class ModelConfig(BaseModel):
    """How a worker serves one model. Every field but `path` has a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    #: Name under which clients submit; the file's stem where it is not given.
    name: Annotated[str, AfterValidator(check_name)]
    engine: Literal["onnxruntime", "tensorrt"] = "onnxruntime"
    #: The model file, relative to the YAML file; absolute once loaded.
    path: Path
    #: Most rows in a batch; if not given, lowered to what the model itself takes.
    max_batch: int = Field(default=64, ge=1, le=_MOST_ROWS)
    #: How long a batch may wait for more tasks, counted from its first task; 0 never waits.
    max_delay_ms: float = Field(default=2.0, ge=0, le=600_000)
    #: Batches that may be in work at once, each with its own buffers.
    slots: int = Field(default=1, ge=1, le=16)
    #: Most rows of one task, which is never split over batches; default `max_batch`.
    max_rows_per_task: int | None = Field(default=None, ge=1, le=_MOST_ROWS)
    #: How long one run of a batch may take before its worker is replaced; 0 or None: for ever.
    batch_timeout_s: float | None = Field(default=60.0, ge=0, le=_MOST_TIMEOUT_S)
    forbid_nan: bool = False
    queue_max_rows: int = Field(default=100_000, ge=1, le=MAX_COUNT)
    queue_max_bytes: int = Field(default=256 << 20, ge=1, le=MAX_COUNT)
    max_task_bytes: int = Field(default=16 << 20, ge=1, le=MAX_COUNT)
    #: Rows a second that the queue accepts, in all and from one client; None: no limit.
    rate_limit: RateLimit | None = None
    #: ONNX Runtime's threads within one operator; 0 leaves the number to it.
    threads: int = Field(default=0, ge=0, le=1024)
    #: How TensorRT builds a plan from an ONNX file; a finished plan needs none.
    build: BuildOptions = BuildOptions()
    #: A Python function that makes the model's inputs from what clients send.
    preprocess: PreprocessOptions | None = None
    #: A Python function that makes what clients get from the model's outputs.
    postprocess: PostprocessOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_slots(cls, data: Any) -> Any:
        if isinstance(data, dict) and "slots" not in data:
            slots = _DEFAULT_SLOTS.get(str(data.get("engine")))
            return data if slots is None else {**data, "slots": slots}
        return data

    @field_validator("batch_timeout_s")
    @classmethod
    def _none_or_some(cls, value: float | None) -> float | None:
        if value and value < _LEAST_TIMEOUT_S:
            raise ValueError(f"use {_LEAST_TIMEOUT_S} or more, or 0 for no limit")
        return value

    @model_validator(mode="after")
    def _limits_agree(self) -> ModelConfig:
        rows = self.max_rows_per_task
        if rows is not None and rows > self.max_batch:
            raise ValueError(
                f"max_rows_per_task is {rows} but max_batch {self.max_batch}, and a task is never "
                "split over batches: lower the one or raise the other"
            )
        if self.queue_max_rows < (rows or self.max_batch):
            raise ValueError(
                f"queue_max_rows is {self.queue_max_rows}, less than the {rows or self.max_batch} "
                "rows of one task: raise it"
            )
        if self.queue_max_bytes < self.max_task_bytes:
            raise ValueError(
                f"queue_max_bytes is {self.queue_max_bytes}, less than max_task_bytes "
                f"{self.max_task_bytes}: raise it"
            )
        burst_rows = self.rate_limit.least_burst_rows if self.rate_limit else None
        if burst_rows is not None and burst_rows < (rows or self.max_batch):
            raise ValueError(
                f"rate_limit allows a burst of {burst_rows} rows, less than the "
                f"{rows or self.max_batch} rows of one task, which would never pass: raise it or "
                "lower max_rows_per_task"
            )
        return self

    @property
    def batch_timeout_ms(self) -> float | None:
        """`batch_timeout_s` in ms; None where a run may take for ever."""
        return self.batch_timeout_s * 1000 if self.batch_timeout_s else None

    def model_spec(self, engine_spec: EngineSpec, capacity: int | None) -> ModelSpec:
        """What clients are told about the loaded model.

        `capacity` is the most rows that one run of the engine takes (None: no limit). Raises
        ConfigError if the file asks for more.
        """
        max_batch = self.max_batch
        if capacity is not None and capacity < max_batch:
            if "max_batch" in self.model_fields_set:
                raise ConfigError(
                    f"model {self.name!r}: max_batch is {max_batch}, but {self.path} takes at most "
                    f"{capacity} rows a batch; lower max_batch or export the model for more rows"
                )
            max_batch = capacity
        most = max(len(engine_spec.inputs), len(engine_spec.outputs))
        if most > MAX_TENSORS:
            raise ConfigError(
                f"model {self.name!r}: {self.path} has {most} inputs or outputs, at most "
                f"{MAX_TENSORS} can travel"
            )
        rows = self.max_rows_per_task or max_batch
        if rows > max_batch:
            raise ConfigError(
                f"model {self.name!r}: max_rows_per_task is {rows}, but {self.path} takes at most "
                f"{max_batch} rows a batch; lower max_rows_per_task"
            )
        return ModelSpec(
            name=self.name,
            inputs=engine_spec.inputs,
            outputs=engine_spec.outputs,
            max_batch=max_batch,
            max_rows_per_task=rows,
            max_task_bytes=self.max_task_bytes,
            queue_max_rows=self.queue_max_rows,
            queue_max_bytes=self.queue_max_bytes,
            # One batch in every slot, and two more that fill up meanwhile.
            cover_rows=max_batch * (self.slots + 2),
            forbid_nan=self.forbid_nan,
        )


def load_models(folders: Sequence[Path]) -> list[ModelConfig]:
    """Every model configured by a `*.yaml` file in one of `folders`, in order of the files.

    Raises ConfigError for a folder or file that cannot be read, an unknown key (naming the
    nearest known one), a wrong value or no file at all, and ModelConflict for two models of one
    name. The model files themselves are read by their engines.
    """
    found: dict[str, tuple[ModelConfig, Path]] = {}
    for file in _files(folders):
        config = load_model(file)
        if config.name in found:
            raise ModelConflict(
                f"two models are named {config.name!r}, in {found[config.name][1]} and {file}: "
                "set another `name` in one of them"
            )
        found[config.name] = (config, file)
    if not found:
        raise ConfigError(
            f"no model configuration (*.yaml) in {', '.join(map(str, folders)) or 'no folder'}"
        )
    return [config for config, _ in found.values()]


def _files(folders: Sequence[Path]) -> list[Path]:
    # Keyed by the resolved path: a folder given twice is no conflict.
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} does not exist or is no folder")
        found.update(dict.fromkeys(sorted(folder.resolve().glob("*.yaml"))))
    return list(found)


def load_model(file: Path) -> ModelConfig:
    """The model that one `*.yaml` file configures; raises ConfigError as `load_models` does."""
    keys = {"name": file.stem, **_read(file)}
    for key in keys:
        if key not in ModelConfig.model_fields:
            raise ConfigError(f"{file}: unknown key {quoted(key)}{_nearest(key)}")
    path = keys.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"{file}: `path` must name the model file, relative to this one; it is {quoted(path)}"
        )
    try:
        resolved = (file.parent / path).resolve()
    except (OSError, ValueError, RuntimeError) as failure:
        raise ConfigError(f"{file}: `path` {quoted(path)} is no path: {failure}") from None
    try:
        return ModelConfig.model_validate({**keys, "path": resolved})
    except ValidationError as failure:
        raise ConfigError(f"{file}: {_describe(failure)}") from None


def _read(file: Path) -> dict[Any, Any]:
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"{file} has more than {_MOST_BYTES} bytes: it configures no model")
        text = raw.decode("utf-8")
    except (OSError, ValueError) as failure:
        raise ConfigError(f"{file} cannot be read: {failure}") from failure
    try:
        content = yaml.load(text, _Loader)  # a SafeLoader
    except RecursionError:
        raise ConfigError(f"{file} is no valid YAML: nested too deeply") from None
    # Dates, times and numbers that are none raise what Python's own types raise.
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, ValueError) as failure:
        raise ConfigError(f"{file} is no valid YAML: {str(failure)[:500]}") from None
    if content is None:
        raise ConfigError(f"{file} is empty; it needs at least `path`, the model file")
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected `key: value` lines, not {type(content).__name__}")
    return content


class _Loader(yaml.SafeLoader):
    """A SafeLoader for short files.

    Refuses aliases, a few lines of which stand for more values than memory holds, brackets in
    brackets, for which PyYAML's time grows with their square, and a key given twice.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, times in names.most_common(1):
            if times > 1:
                raise yaml.YAMLError(f"the key {quoted(name)} is there {times} times: keep one")
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= _MOST_LEVELS:
            raise yaml.YAMLError(f"more than {_MOST_LEVELS} brackets in one another")
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not allowed: write the value itself")
        return super().compose_node(parent, index)


def _nearest(key: object) -> str:
    known = list(ModelConfig.model_fields)
    word = key[:100] if isinstance(key, str) else ""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known keys are {', '.join(known)}"


def _describe(failure: ValidationError) -> str:
    parts = []
    for error in failure.errors(include_url=False):
        key = printable(".".join(str(part)[:100] for part in error["loc"]))
        message = error["msg"].removeprefix("Value error, ")[:500]
        parts.append(f"{key} is {quoted(error['input'])}: {message}" if key else message)
    more = f"; and {len(parts) - _MOST_PARTS} more" if len(parts) > _MOST_PARTS else ""
    return "; ".join(parts[:_MOST_PARTS]) + more
