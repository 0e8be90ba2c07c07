"""What a Celery worker process owns: the runtime of its models, or a client for `trtq.infer`."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from celery import signals
from celery.worker import state
from kombu import Queue

from producer.client import Client
from producer.config import ProducerSettings
from producer.errors import ConfigError, MissingExtra, NoDevice, TrtqError
from producer.keys import INFER_QUEUE, bell_queue
from workers.devices import CPU, limit_to_device
from workers.logs import JSON, say, write_json
from workers.models import ModelConfig, load_models
from workers.observe import Observer
from workers.runtime import Runtime
from workers.settings import EXIT_CONFIG, SUPERVISOR_FD, WorkerSettings, worker_settings
from workers.watchdog import FreezeGuard

log = logging.getLogger("trtq.process")

EXIT_FATAL = 70
#: What an orphan's warm stop may take beyond its drain grace before it kills itself.
_ORPHAN_MARGIN_S = 10.0
#: How long no thread may run, beyond the longest batch timeout, before the process is ended.
_FREEZE_MARGIN_S = 10.0


class WorkerProcess:
    """Owner of everything that lives as long as the worker. Celery's boot step drives it."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._client: Client | None = None
        self._observer: Observer | None = None
        self._configs: list[ModelConfig] = []
        self._settings: WorkerSettings | None = None

    @property
    def runtime(self) -> Runtime:
        """The models; raises ConfigError in a process that serves none."""
        if self._runtime is None:
            raise ConfigError("this process serves no models: it consumes no model's queue")
        return self._runtime

    @property
    def client(self) -> Client:
        """The client of `trtq.infer`; raises ConfigError in a process that does not serve it."""
        if self._client is None:
            raise ConfigError(f"this process does not serve {INFER_QUEUE}: start it with -Q")
        return self._client

    def configure(self, conf: Any, queues: Any) -> WorkerSettings:
        """Reads settings and models before Celery chooses its queues; ends the process if wrong.

        Returns the settings, the device by the name under which it is known.

        Without -Q a worker serves every configured model.
        """
        named = [q for q in (queues.split(",") if isinstance(queues, str) else queues or []) if q]
        try:
            settings = worker_settings()
            # Now, as CUDA reads what it may see once, when it is initialised.
            device = limit_to_device(settings.device)
            settings = self._settings = settings.model_copy(update={"device": device})
            if named != [INFER_QUEUE]:
                self._configs = load_models(settings.model_folders)
        except (TrtqError, ValueError) as failure:
            refuse(failure)
        names = [bell_queue(config.name) for config in self._configs]
        unknown = [name for name in named if name not in (*names, INFER_QUEUE)]
        if unknown:
            refuse(ConfigError(f"queues {unknown} belong to no model; there are {names}"))
        conf.task_queues = [Queue(name, routing_key=name) for name in (*names, INFER_QUEUE)]
        if not named:
            conf.task_queues = conf.task_queues[:-1]
        return settings

    def start(self, worker: Any) -> None:
        """Loads and warms what the consumed queues need, before the first bell is taken."""
        assert self._settings is not None
        queues = set(worker.app.amqp.queues.consume_from)
        served = [c for c in self._configs if bell_queue(c.name) in queues]
        try:
            _check_device(served, self._settings.device)
            self._observer = Observer(self._settings, lambda: self._runtime)
            self._observer.start()
            if served:
                self._runtime = Runtime(
                    self._settings,
                    worker.hostname,
                    served,
                    on_fatal=self._end,
                    others_wait=_others_wait,
                    freeze_guard=_freeze_guard(served),
                )
                self._runtime.start()
            if INFER_QUEUE in queues:
                client = Client(
                    self._settings.redis_url,
                    name="infer",
                    settings=ProducerSettings(redis_url=self._settings.redis_url),
                )
                self._client = client.start()
        except (ConfigError, MissingExtra) as failure:
            refuse(failure)
        except TrtqError as failure:
            log.critical("the worker cannot start: [%s] %s", failure.code, failure)
            self.close()
            sys.exit(EXIT_FATAL)

    def _end(self, reason: str) -> None:
        """A thread that the worker needs has died or hangs: ends the process with EXIT_FATAL.

        The supervisor starts a new one. Called in any thread.
        """
        log.critical("ending the worker: %s", reason)
        self.request_stop()
        # Celery ends with this code after a warm stop; `should_terminate` would end with 0.
        state.should_stop = EXIT_FATAL
        assert self._settings is not None
        # A warm stop may hang on the very thing that failed.
        last = threading.Timer(
            self._settings.drain_grace_s + _ORPHAN_MARGIN_S, os._exit, (EXIT_FATAL,)
        )
        last.daemon = True
        last.start()

    def request_stop(self) -> None:
        """The worker was asked to stop: turns end soon."""
        if self._runtime is not None:
            self._runtime.request_stop()

    def close(self) -> None:
        """Waits for the turn, frees everything."""
        if self._runtime is not None:
            if not self._runtime.close():
                log.error("the turn outlived the drain grace; its tasks will be run again")
            if self._runtime.hung:
                # Handlers and destructors of an engine in use may hang as well.
                atexit.register(_exit_at_once)
            self._runtime = None
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._observer is not None:
            self._observer.close()
            self._observer = None


def watch_signals(process: WorkerProcess) -> None:
    """Connects `process` to the worker's life cycle."""

    def on_init(
        sender: Any = None,
        instance: Any = None,
        conf: Any = None,
        options: Any = None,
        **_: Any,
    ) -> None:
        settings = process.configure(conf, (options or {}).get("queues"))
        if settings.log_format == JSON:
            write_json(str(sender), settings.device)
            # Celery's banner is no record of the log.
            instance.quiet = True
        fd = os.environ.pop(SUPERVISOR_FD, "")
        if fd:
            watch_supervisor(int(fd), settings.drain_grace_s + _ORPHAN_MARGIN_S)

    def on_shutdown(**_: Any) -> None:
        process.request_stop()

    signals.celeryd_init.connect(on_init, weak=False)
    signals.worker_shutting_down.connect(on_shutdown, weak=False)


def watch_supervisor(
    fd: int,
    stop_s: float,
    send_signal: Callable[[int], None] = lambda number: os.kill(os.getpid(), number),
    sleep: Callable[[float], None] = time.sleep,
) -> threading.Thread:
    """Ends this process after its supervisor, of which `fd` is the read end of a pipe.

    A thread (the one returned) sends SIGTERM when the pipe ends, and SIGKILL `stop_s` seconds
    later. An orphan must go: the next supervisor starts another worker for the same device.
    """
    os.set_inheritable(fd, False)

    def watch() -> None:
        # Blocks for the supervisor's life: it writes nothing, and the kernel closes its end.
        while os.read(fd, 1):
            pass
        log.critical("the supervisor has died: stopping")
        send_signal(signal.SIGTERM)
        sleep(stop_s)
        log.critical("the stop took longer than %g s: killing this process", stop_s)
        send_signal(signal.SIGKILL)

    thread = threading.Thread(target=watch, name="trtq-supervisor", daemon=True)
    thread.start()
    return thread


def _freeze_guard(served: list[ModelConfig]) -> FreezeGuard:
    timeouts_s = [config.batch_timeout_s or 0.0 for config in served]
    return FreezeGuard(max(timeouts_s) + _FREEZE_MARGIN_S if all(timeouts_s) else None)


def _exit_at_once() -> None:
    logging.shutdown()
    os._exit(EXIT_FATAL)


def _check_device(configs: list[ModelConfig], device: str) -> None:
    names = [config.name for config in configs if config.engine == "tensorrt"]
    if names and device == CPU.device:
        raise NoDevice(
            f"models {names} have `engine: tensorrt`, and this worker has no GPU "
            f"(TRTQ_DEVICE={device}): start it with --devices all or the index of a GPU, or set "
            "`engine: onnxruntime`"
        )


def _others_wait() -> bool:
    return len(state.reserved_requests) > len(state.active_requests)


def refuse(failure: Exception) -> NoReturn:
    """Ends the process with EXIT_CONFIG: it would fail so again."""
    message = failure.message if isinstance(failure, TrtqError) else str(failure)
    say(f"trtq worker: {message}")
    sys.exit(EXIT_CONFIG)
