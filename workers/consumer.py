"""Celery's consumer, made to survive a Redis that goes away with messages unacknowledged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.worker.consumer import Consumer
from kombu.transport import redis as redis_transport
from kombu.transport import virtual
from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError

from producer.connection import access_denied
from producer.link import is_out_of_memory
from workers.settings import EXIT_CONFIG

_EVENT_DELAY_S = 0.05

log = logging.getLogger("trtq.consumer")


class BellQoS(redis_transport.QoS):  # type: ignore[misc]
    """Takes bells also from a Redis at maxmemory, which notes no unacknowledged message."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Notes a message that was taken; in Redis if it has room."""
        try:
            super().append(message, delivery_tag)
        except OutOfMemoryError:
            # Without turns the queues would never drain and Redis would stay full.
            virtual.QoS.append(self, message, delivery_tag)

    @contextmanager
    def pipe_or_acquire(self, pipe: Any = None, client: Any = None) -> Iterator[Any]:
        """A pipeline without MULTI, in which Redis 6.2 at maxmemory refuses every command."""
        if pipe:
            yield pipe
        else:
            with self.channel.conn_or_acquire(client) as connection:
                yield connection.pipeline(transaction=False)

    def restore_visible(self, *args: Any, **kwargs: Any) -> Any:
        """Celery's sweep over old unacknowledged messages, which needs a lock in Redis."""
        try:
            return super().restore_visible(*args, **kwargs)
        except OutOfMemoryError as failure:
            log.debug("unacknowledged messages wait, Redis is at maxmemory: %s", failure)
            return None


class BellChannel(redis_transport.Channel):  # type: ignore[misc]
    """A channel that works, without Celery's remote control, while Redis is at maxmemory."""

    QoS = BellQoS

    def _queue_bind(self, exchange: str, routing_key: str, pattern: Any, queue: str) -> None:
        try:
            super()._queue_bind(exchange, routing_key, pattern, queue)
        except ResponseError as failure:
            if not is_out_of_memory(failure):
                raise
            log.warning("queue %s is not bound, Redis is at maxmemory: %s", queue, failure)

    def _size(self, queue: str) -> int:
        try:
            return int(super()._size(queue))
        except OutOfMemoryError:
            # Asked in a MULTI, only to be told when a queue is declared.
            return 0


class BellTransport(redis_transport.Transport):  # type: ignore[misc]
    """kombu's Redis transport for workers of models."""

    Channel = BellChannel


class SurvivingConsumer(Consumer):  # type: ignore[misc]
    """Goes on where Celery 5.7.0 ends the worker.

    There, closing the lost connection restores unacknowledged messages over that very
    connection, and what this raises ends the process. Our messages are bells: losing one is
    harmless, so the cleanup and late acknowledgements may fail.
    """

    _flush_is_due = False

    def start(self) -> None:
        """Consumes until the worker stops; ends it with 78 where Redis' access rules refuse it."""
        try:
            super().start()
        except NoPermissionError as failure:
            denied = access_denied(failure, self.app.conf.broker_url)
            log.critical("trtq worker: %s", denied.message)
            raise SystemExit(EXIT_CONFIG) from None

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
