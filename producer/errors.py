"""Every error that trtq raises or sends, as one tree with stable codes.

A code travels on the wire and never changes once released; a class may be renamed, its code may
not. `TrtqError` catches everything; the second level says whose turn it is to act:

    TrtqError
      ConfigError             the operator: configuration, model files, missing extras
      InvalidInput            the caller: what was submitted can never run as it is
      Unavailable             try again later: Redis, a full queue, no answer yet
      TaskFailed              the task was accepted and ended without a result
      BulkError               a bulk job's files
      WireError               bytes that are no message of ours
"""

from __future__ import annotations

from typing import ClassVar


class TrtqError(Exception):
    """Base of all errors of trtq; `code` is stable across releases."""

    code: ClassVar[str] = "error"

    @property
    def message(self) -> str:
        """The human-readable text without the code."""
        return str(self.args[0]) if self.args else self.code


class ConfigError(TrtqError):
    """A setting, model configuration or model file is wrong."""

    code = "config"


class AccessDenied(ConfigError):
    """Redis refused the login, a command or a key to this user."""

    code = "access_denied"


class TlsFailed(ConfigError):
    """The encrypted connection to Redis is not to be trusted: the server's certificate, or ours."""

    code = "tls_failed"


class MissingExtra(ConfigError):
    """A feature needs a package of an optional extra that is not installed."""

    code = "missing_extra"


class ModelConflict(ConfigError):
    """Two different models claim one name."""

    code = "model_conflict"


class ModelFileError(ConfigError):
    """A model file is missing, unreadable or not of the engine's format."""

    code = "model_file"


class EngineBuildFailed(ConfigError):
    """TensorRT could not build a plan from the ONNX model."""

    code = "engine_build_failed"


class EngineMismatch(ConfigError):
    """A plan belongs to another GPU, TensorRT version, profile or set of binding names."""

    code = "engine_mismatch"


class NoDevice(ConfigError):
    """No usable NVIDIA GPU is visible to this process."""

    code = "no_device"


class InvalidInput(TrtqError, ValueError):
    """The submitted inputs can never be run by the model."""

    code = "invalid_input"


class UnknownModel(InvalidInput):
    """No worker has published a model of that name."""

    code = "unknown_model"


class UnknownDeadLetter(InvalidInput):
    """No dead letter of that id: never there, dropped, requeued or expired."""

    code = "unknown_dead_letter"


class WrongInputName(InvalidInput):
    """An input is missing, or the model has none of that name."""

    code = "wrong_input_name"


class WrongDtype(InvalidInput):
    """A dtype that the model's input cannot take without loss."""

    code = "wrong_dtype"


class WrongShape(InvalidInput):
    """A rank or a fixed dimension that differs from the model's."""

    code = "wrong_shape"


class NoRows(InvalidInput):
    """A batch of zero rows."""

    code = "no_rows"


class TooManyRows(InvalidInput):
    """More rows than the model allows in one task."""

    code = "too_many_rows"


class ForbiddenNaN(InvalidInput):
    """NaN in an input (or output) of a model that forbids it."""

    code = "forbidden_nan"


class MessageTooLarge(InvalidInput):
    """The encoded task is larger than the model allows."""

    code = "message_too_large"


class Unavailable(TrtqError):
    """Nothing is wrong with the request; it may succeed later."""

    code = "unavailable"


class RedisUnavailable(Unavailable, ConnectionError):
    """Redis did not answer; the message names the URL without its password."""

    code = "redis_unavailable"


class RedisFull(RedisUnavailable):
    """Redis is at its `maxmemory` and takes no task; nothing of it was written."""

    code = "redis_full"


class QueueFull(Unavailable):
    """The model's queue is at its limit of rows or bytes."""

    code = "queue_full"


class ResultTimeout(Unavailable, TimeoutError):
    """`result(timeout)` ended before the answer came; the task goes on."""

    code = "result_timeout"


class ResultMissing(Unavailable, KeyError):
    """No stored result under that task id (never stored, not ready, or expired)."""

    code = "result_missing"

    def __str__(self) -> str:
        return self.message


class ClientClosed(Unavailable):
    """The client was closed before the task was answered."""

    code = "client_closed"


class TaskFailed(TrtqError):
    """An accepted task ended without a result."""

    code = "task_failed"


class EngineFailed(TaskFailed):
    """The engine raised on this task, also when it ran alone."""

    code = "engine_failed"


class OutOfDeviceMemory(EngineFailed):
    """The GPU has not enough free memory for the engine or the batch."""

    code = "out_of_device_memory"


class DeviceLost(EngineFailed):
    """The GPU stopped answering; the process must end to use it again."""

    code = "device_lost"


class HookFailed(TaskFailed):
    """A model's preprocess or postprocess function raised, or gave what the model does not take."""

    code = "hook_failed"


class DeadlineExceeded(TaskFailed, TimeoutError):
    """The task's deadline passed before it was run."""

    code = "deadline_exceeded"


class Cancelled(TaskFailed):
    """The task was cancelled before it was run."""

    code = "cancelled"


class PoisonTask(TaskFailed):
    """The task was delivered too often without an answer: it probably kills its worker."""

    code = "poison_task"


class BatchTimeout(TaskFailed, TimeoutError):
    """The engine ran this task alone for longer than the model's `batch_timeout_s`."""

    code = "batch_timeout"


class BulkError(TrtqError):
    """A bulk job's files or state."""

    code = "bulk"


class PathNotAllowed(BulkError):
    """A path outside the worker's allow-listed roots."""

    code = "path_not_allowed"


class FileMissing(BulkError):
    """A file of a bulk job does not exist or cannot be read."""

    code = "file_missing"


class FileChanged(BulkError):
    """A file of a bulk job shrank or changed while the job used it."""

    code = "file_changed"


class FileFormat(BulkError):
    """A file is no .npy of the dtype and row shape that the model needs."""

    code = "file_format"


class OutputMismatch(BulkError):
    """The output file's shape or dtype differs from what the job writes."""

    code = "output_mismatch"


class OutputFailed(BulkError):
    """Writing rows to the output file failed (disk full, input/output error)."""

    code = "output_failed"


class JobBusy(BulkError):
    """Another bulk job writes to the same output."""

    code = "job_busy"


class WireError(TrtqError):
    """Bytes that are no message of this version."""

    code = "wire"


class CorruptMessage(WireError):
    """Truncated, oversized or garbage bytes."""

    code = "corrupt_message"


class UnsupportedVersion(WireError):
    """A message of a newer wire version than this side reads."""

    code = "unsupported_version"


def _tree(root: type[TrtqError]) -> dict[str, type[TrtqError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[TrtqError]] = _tree(TrtqError)


def from_code(code: str, message: str) -> TrtqError:
    """The error that a peer sent; an unknown code becomes TaskFailed with the code in its text."""
    found = BY_CODE.get(code)
    if found is None:
        return TaskFailed(f"{message} [{code}]")
    return found(message)
