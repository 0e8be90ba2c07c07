"""mosec: an echo server with dynamic batching. Run with mosec's own options (--port, ...)."""

from __future__ import annotations

from mosec import Server, Worker  # type: ignore[import-not-found]

_BATCH = 64
_WAIT_MS = 2


class Echo(Worker):  # type: ignore[misc]
    """Returns what it gets; raw bytes, so that no JSON is paid for."""

    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: list[bytes]) -> list[bytes]:
        return data


def main() -> None:
    server = Server()
    server.append_worker(Echo, num=1, max_batch_size=_BATCH, max_wait_time=_WAIT_MS)
    server.run()


if __name__ == "__main__":
    main()
