"""Certificates, and TLS in front of a Redis that speaks none."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Pair(NamedTuple):
    """A certificate and its key, PEM files."""

    cert: Path
    key: Path


def _openssl(*arguments: object) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs the openssl program to make certificates")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_ca(folder: Path, name: str) -> Pair:
    """A certificate authority of its own."""
    made = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    _openssl(
        *("req", "-x509", *_KEY, "-days", 2, "-subj", f"/CN={name}"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        *("-keyout", made.key, "-out", made.cert),
    )
    return made


def make_cert(folder: Path, name: str, ca: Pair, alternative_names: str) -> Pair:
    """A certificate for `alternative_names`, like "DNS:localhost,IP:127.0.0.1"."""
    made = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(
        f"subjectAltName={alternative_names}\nauthorityKeyIdentifier=keyid\n"
        "basicConstraints=CA:FALSE\n"
    )
    _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", made.key, "-out", request)
    _openssl(
        *("x509", "-req", "-in", request, "-days", 2, "-CA", ca.cert, "-CAkey", ca.key),
        *("-CAcreateserial", "-extfile", extensions, "-out", made.cert),
    )
    return made


@contextmanager
def tls_in_front(port: int, server: Pair, client_ca: Path | None = None) -> Iterator[int]:
    """A port of 127.0.0.1 that speaks TLS and hands on to `port`.

    With `client_ca`, only to clients with a certificate that it signed.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=client_ca)
    context.load_cert_chain(server.cert, server.key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="tls-proxy", daemon=True)
    thread.start()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner[1]), copy(inner[0], writer))

    async def start() -> asyncio.Server:
        return await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)

    async def stop() -> None:
        serving.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    serving = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield serving.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
