"""Celery's consumer, made to survive what it meets.

A Redis that goes away with messages unacknowledged, one at maxmemory, messages that are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any

from celery.worker.consumer import Consumer
from kombu.transport import redis as redis_transport
from kombu.transport import virtual
from redis.exceptions import (
    DataError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from producer.connection import access_denied
from producer.errors import CorruptMessage
from producer.link import is_out_of_memory
from producer.quote import one_line, quoted
from workers.messages import accepted_tasks, check_message
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

    def _brpop_read(self, **options: Any) -> Any:
        """Delivers one message; kombu lets what is no JSON end the worker."""
        try:
            return super()._brpop_read(**options)
        except (RedisError, OSError, Empty):
            raise
        except Exception as failure:  # noqa: BLE001 - whatever somebody put there is taken out
            _dropped("what is no JSON object", failure)
            raise Empty from None

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

    def _deliver(self, message: Any, queue: str) -> None:
        """Hands a message to its consumer, unless it lacks what kombu's envelope has."""
        try:
            super()._deliver(message, queue)
        except DataError as failure:
            _dropped(f"a message in {quoted(queue)} whose delivery tag is none", failure)
        except (RedisError, OSError, Empty):
            raise
        except Exception as failure:  # noqa: BLE001 - it must not end the worker
            _dropped(f"a message in {quoted(queue)} that is none of kombu's", failure)


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

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """What is called with each message: only well-formed calls of our tasks reach Celery's."""
        handle = super().create_task_handler(*args, **kwargs)
        accepted = accepted_tasks(self.app.amqp.queues.consume_from)

        def checked(message: Any) -> Any:
            try:
                check_message(message, accepted)
                return handle(message)
            except CorruptMessage as failure:
                _dropped("a message", failure)
            except (RedisError, OSError):
                raise
            except Exception as failure:
                log.exception("Celery could not take message %s", quoted(message.delivery_tag))
                _dropped("it", failure)
            if not message.acknowledged:
                # Else it counts for ever as one that this worker is busy with.
                message.reject_log_error(log, self.connection_errors)
            return None

        return checked

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


def _dropped(what: str, failure: Exception) -> None:
    text = failure.message if isinstance(failure, CorruptMessage) else repr(failure)
    log.error("dropped %s from Celery's queues: %s", what, one_line(text))
