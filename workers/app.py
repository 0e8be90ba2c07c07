"""The Celery application: `celery -A workers.app worker`."""

from __future__ import annotations

from typing import Any

from celery import Celery, bootsteps

from producer.config import RedisSettings
from producer.errors import ConfigError
from workers.broker import broker_of
from workers.process import WorkerProcess, refuse, watch_signals
from workers.tasks import register

#: Without these a connection that is open and dead stops a worker's consuming for ever.
_BROKER_TIMEOUT_S = 3.0
_BELL_OVERDUE_S = 2


class ModelsStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads models before the consumer takes the first bell; frees them after the last turn."""

    requires = {"celery.worker.components:Pool"}

    def start(self, worker: Any) -> None:
        """Loads and warms."""
        process.start(worker)

    def stop(self, worker: Any) -> None:
        """Drains and frees."""
        process.close()

    terminate = stop


def make_app() -> Celery:
    """The configured application; its settings suit bells, not tasks with data."""
    broker = broker_of(RedisSettings().redis_url)
    made = Celery("trtq", broker=broker.url, backend=broker.url)
    made.conf.update(
        accept_content=["json"],
        broker_use_ssl=broker.use_ssl,
        broker_transport="workers.consumer:BellTransport",
        broker_connection_max_retries=None,
        broker_connection_retry=True,
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            "socket_keepalive": True,
            "socket_timeout": _BROKER_TIMEOUT_S,
            "socket_connect_timeout": _BROKER_TIMEOUT_S,
            # How long after its own timeout a wait for bells that has no answer is given up.
            "health_check_interval": _BELL_OVERDUE_S,
            "visibility_timeout": 600,
        },
        redis_backend_use_ssl=broker.use_ssl,
        redis_socket_connect_timeout=_BROKER_TIMEOUT_S,
        redis_socket_keepalive=True,
        redis_socket_timeout=_BROKER_TIMEOUT_S,
        result_backend_always_retry=True,
        result_backend_max_retries=10,
        result_expires=3600,
        task_acks_late=False,
        task_create_missing_queues=True,
        task_ignore_result=False,
        task_routes={"trtq.infer": {"queue": "trtq.infer"}},
        task_send_sent_event=False,
        task_serializer="json",
        task_track_started=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_concurrency=1,
        worker_consumer="workers.consumer:SurvivingConsumer",
        worker_hijack_root_logger=True,
        worker_pool="threads",
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
    )
    made.steps["worker"].add(ModelsStep)
    return made


process = WorkerProcess()
try:
    app = make_app()
except ConfigError as failure:
    refuse(failure)
register(app, process)
watch_signals(process)
