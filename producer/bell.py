"""Rings: sends the Celery message that tells some worker that a model has work.

A bell carries no task. One that is lost costs a second (a worker's watch rings again), one that
is doubled costs an empty turn.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from producer import keys
from producer.config import redact

log = logging.getLogger("trtq.bell")


class Bell:
    """Sends bells over one broker connection. Celery is imported at the first one."""

    def __init__(self, broker_url: str) -> None:
        self._broker_url = broker_url
        self._app: Any = None
        self._producer: Any = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Imports Celery and connects ahead of the first bell; a failure only costs that lead."""
        try:
            with self._lock:
                self._connect().connection.ensure_connection(max_retries=1)
        except Exception as failure:  # noqa: BLE001 - kombu's transports raise many types
            log.warning("no broker connection to %s yet: %s", redact(self._broker_url), failure)

    def ring(self, model: str, reason: str) -> bool:
        """Sends one bell; False if the broker did not take it (the watch will ring again)."""
        try:
            with self._lock:
                self._send(model, reason)
        except Exception as failure:  # noqa: BLE001 - kombu's transports raise many types
            log.warning("bell for %s was not sent: %s", model, failure)
            self._drop()
            return False
        return True

    def _send(self, model: str, reason: str) -> None:
        self._connect()
        self._app.send_task(
            keys.SERVE_TASK,
            args=(model, reason),
            queue=keys.bell_queue(model),
            producer=self._producer,
            ignore_result=True,
            retry=False,
            argsrepr=repr((model, reason)),
        )

    def _connect(self) -> Any:
        if self._app is None:
            from celery import Celery

            self._app = Celery("trtq-producer", broker=self._broker_url, set_as_current=False)
            self._app.conf.update(
                task_create_missing_queues=True,
                task_serializer="json",
                broker_transport_options={"socket_timeout": 5, "socket_connect_timeout": 5},
            )
        if self._producer is None:
            connection = self._app.connection_for_write()
            self._producer = self._app.amqp.Producer(connection, auto_declare=False)
        return self._producer

    def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.connection.release()
            except Exception as failure:  # noqa: BLE001 - it was broken before
                log.debug("closing the broker connection: %s", failure)

    def close(self) -> None:
        """Closes the broker connection."""
        with self._lock:
            self._drop()
            if self._app is not None:
                self._app.close()
                self._app = None
