"""The same client for asyncio: submits without blocking the loop, awaitable tickets."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from types import TracebackType
from typing import Any

from producer.client import Client
from producer.config import ProducerSettings
from producer.errors import InvalidInput
from producer.spec import ModelSpec
from producer.ticket import Ticket


class AsyncClient:
    """`Client` with `await`. What may wait for Redis runs in a thread of the loop's executor."""

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        name: str | None = None,
        settings: ProducerSettings | None = None,
    ) -> None:
        self._client = Client(redis_url, name=name, settings=settings)

    async def start(self) -> AsyncClient:
        """Connects; errors as for `Client.start`."""
        await asyncio.to_thread(self._client.start)
        return self

    async def close(self) -> None:
        """As `Client.close`."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> AsyncClient:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def submit(self, model: str, inputs: Any, **options: Any) -> Ticket:
        """As `Client.submit`; `await ticket` gives the result."""
        if self._client.may_wait(model):
            return await asyncio.to_thread(self._client.submit, model, inputs, **options)
        return self._client.submit(model, inputs, **options)

    async def cancel(self, ticket: Ticket) -> bool:
        """As `Ticket.cancel`, without blocking the loop."""
        return await asyncio.to_thread(ticket.cancel)

    async def map(
        self,
        model: str,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        window: int = 256,
        **options: Any,
    ) -> AsyncIterator[Any]:
        """As `Client.map`, over a plain or an asynchronous iterable."""
        async for _, ticket in self._in_order(model, items, window, options):
            yield await ticket

    async def as_completed(
        self,
        model: str,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        window: int = 256,
        **options: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        """As `Client.as_completed`, over a plain or an asynchronous iterable."""
        source = _iterate(items)
        waiting: dict[asyncio.Future[Any], tuple[int, Ticket]] = {}
        numbers = itertools.count()
        exhausted = False
        try:
            while True:
                while not exhausted and len(waiting) < _window(window):
                    try:
                        item = await anext(source)
                    except StopAsyncIteration:
                        exhausted = True
                        break
                    ticket = await self.submit(model, item, **options)
                    waiting[asyncio.ensure_future(_wait(ticket))] = (next(numbers), ticket)
                if not waiting:
                    return
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    index, _ticket = waiting.pop(future)
                    yield index, future.result()
        finally:
            for future, (_, ticket) in waiting.items():
                future.cancel()
                await self.cancel(ticket)

    async def result(self, task_id: str, *, by_name: bool = False) -> Any:
        """As `Client.result`."""
        return await asyncio.to_thread(self._client.result, task_id, by_name=by_name)

    async def spec(self, model: str) -> ModelSpec:
        """As `Client.spec`."""
        return await asyncio.to_thread(self._client.spec, model)

    async def models(self) -> list[ModelSpec]:
        """As `Client.models`."""
        return await asyncio.to_thread(self._client.models)

    async def _in_order(
        self,
        model: str,
        items: Iterable[Any] | AsyncIterable[Any],
        window: int,
        options: dict[str, Any],
    ) -> AsyncIterator[tuple[int, Ticket]]:
        tickets: deque[Ticket] = deque()
        index = 0
        try:
            async for item in _iterate(items):
                tickets.append(await self.submit(model, item, **options))
                if len(tickets) >= _window(window):
                    yield index, tickets.popleft()
                    index += 1
            while tickets:
                yield index, tickets.popleft()
                index += 1
        finally:
            for ticket in tickets:
                await self.cancel(ticket)


async def _wait(ticket: Ticket) -> Any:
    return await ticket


async def _iterate(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _window(window: int) -> int:
    if window < 1:
        raise InvalidInput(f"window {window!r}: use 1 or more")
    return window
