"""Celery's consumer, made to survive a Redis that goes away with messages unacknowledged."""

from __future__ import annotations

import logging
from typing import Any

from celery.worker.consumer import Consumer

_EVENT_DELAY_S = 0.05

log = logging.getLogger("trtq.consumer")


class SurvivingConsumer(Consumer):  # type: ignore[misc]
    """Goes on where Celery 5.7.0 ends the worker.

    There, closing the lost connection restores unacknowledged messages over that very
    connection, and what this raises ends the process. Our messages are bells: losing one is
    harmless, so the cleanup and late acknowledgements may fail.
    """

    _flush_is_due = False

    def on_connection_error_after_connected(self, exc: BaseException) -> None:
        """Called when the broker connection broke."""
        try:
            super().on_connection_error_after_connected(exc)
        except Exception as failure:  # noqa: BLE001 - whatever the cleanup hits, reconnect
            log.warning("the lost broker connection could not be cleaned up: %r", failure)
            self.connection = None

    def on_send_event_buffered(self) -> None:
        """Called when an event waits to be sent.

        A moment's delay joins the events of one task into one message, and keeps their cost away
        from the turn that has just begun.
        """
        if self.hub and not self._flush_is_due:
            self._flush_is_due = True
            self.hub.call_later(_EVENT_DELAY_S, self._flush_events)

    def _flush_events(self) -> None:
        self._flush_is_due = False
        super()._flush_events()

    def call_soon_ack(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Acknowledges in the hub; over a connection that is gone that is moot."""

        def safely(*args: Any, **kwargs: Any) -> Any:
            try:
                return p(*args, **kwargs)
            except Exception as failure:  # noqa: BLE001 - the channel may be gone in any way
                log.warning("an acknowledgement was lost with its connection: %r", failure)
                return None

        return super().call_soon_ack(safely, *args, **kwargs)
