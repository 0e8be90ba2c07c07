"""A TCP proxy on loopback that misbehaves on demand: resets, stalls, slow and half-open links."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

_CHUNK_BYTES = 1 << 16
_STOP_S = 5.0


class _Pair:
    """One client's connection and the server's that belongs to it."""

    def __init__(self, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.writers = writers
        self.dead = False
        self.mute = False

    def reset(self) -> None:
        """Ends both connections with RST, as a crashed peer or a firewall does."""
        for writer in self.writers:
            found = writer.get_extra_info("socket")
            if found is not None:
                linger = struct.pack("ii", 1, 0)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()


class Proxy:
    """Forwards 127.0.0.1:`port` to 127.0.0.1:`target`, in a thread of its own. Thread-safe."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._pairs: set[_Pair] = set()
        self._random = random.Random(1)
        self._delay_s = 0.0
        self._refusing = False
        self._thread = threading.Thread(target=self._serve, name="chaos-proxy", daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> Proxy:
        self._thread.start()
        if not self._ready.wait(_STOP_S):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call(self._reset_all)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._pairs)

    def reset(self) -> None:
        """Resets every open connection; new ones are served."""
        self._call(self._reset_all)

    def stall(self, seconds: float) -> None:
        """Forwards nothing for `seconds`; nothing is lost."""
        self._call(lambda: self._stall(seconds))

    def slow(self, delay_s: float) -> None:
        """From now on delays every chunk by `delay_s`; 0 ends it."""

        def change() -> None:
            self._delay_s = delay_s

        self._call(change)

    def half_open(self, share: float = 1.0) -> None:
        """A share of the open connections, chosen by chance, swallows all and never answers.

        They stay open; new ones are served.
        """

        def die() -> None:
            for pair in self._pairs:
                pair.dead = pair.dead or self._random.random() < share

        self._call(die)

    def lose_answers(self, seconds: float) -> None:
        """Open connections take requests to Redis and no answer back, and break after `seconds`."""

        def mute() -> None:
            pairs = list(self._pairs)
            for pair in pairs:
                pair.mute = True
            self._loop.call_later(seconds, lambda: [pair.reset() for pair in pairs])

        self._call(mute)

    def refuse(self, on: bool) -> None:
        """While on, new connections are reset at once."""

        def change() -> None:
            self._refusing = on

        self._call(change)

    def _call(self, action: Callable[[], None]) -> None:
        done = threading.Event()

        def run() -> None:
            try:
                action()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait(_STOP_S)

    def _reset_all(self) -> None:
        for pair in list(self._pairs):
            pair.reset()

    def _stall(self, seconds: float) -> None:
        self._open.clear()
        self._loop.call_later(seconds, self._open.set)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()
        self._server.close()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _listen(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refusing:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            _Pair((writer, writer)).reset()
            return
        pair = _Pair((writer, far_writer))
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(pair, reader, far_writer),
                self._pump(pair, far_reader, writer, answers=True),
            )
        except asyncio.CancelledError:
            # The proxy ends; asyncio's streams would log it for every connection.
            pass
        finally:
            self._pairs.discard(pair)

    async def _pump(
        self,
        pair: _Pair,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        answers: bool = False,
    ) -> None:
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                await self._open.wait()
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                if pair.dead or (answers and pair.mute):
                    continue
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        if not (pair.dead or pair.mute):
            for either in pair.writers:
                either.close()
