"""Plans on disk: one builder for each at a time, checked when read, the oldest removed first."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from producer.errors import ConfigError, EngineBuildFailed

_POLL_S = 0.05
_LIMIT_BYTES = 20 << 30


class PlanCache:
    """A folder of `<key>.plan` files with `<key>.json` sidecars, shared by processes.

    `<key>.kernels` beside a plan is what TensorRT for RTX compiled when it ran. `limit_bytes`
    bounds all together; the least recently used go first, never what was just written. `wait_s` is
    how long one process waits while another builds the same plan.
    """

    def __init__(self, folder: Path, limit_bytes: int, *, wait_s: float = 3600.0) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._wait_s = wait_s

    def path(self, key: str) -> Path:
        """Where the plan of `key` is kept."""
        return self._folder / f"{key}.plan"

    def get(self, key: str, facts: Mapping[str, str]) -> bytes | None:
        """The plan of `key`, now the most recently used; None if absent, damaged or stale.

        Stale is a plan whose sidecar tells other `facts` (flavor, version, GPU).
        """
        try:
            noted = json.loads(self._sidecar(key).read_text(encoding="utf-8"))
            data = self.path(key).read_bytes()
        except (OSError, ValueError, RecursionError):
            return None
        wanted = _note(data, facts)
        if noted != wanted:
            return None
        with suppress(OSError):  # another process may just have removed it
            os.utime(self.path(key))
        return data

    def put(self, key: str, data: bytes, facts: Mapping[str, str]) -> Path:
        """Writes the plan, then the sidecar that makes it valid; returns the plan's path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(key), data)
        note = json.dumps(_note(data, facts), indent=2).encode()
        write_atomically(self._sidecar(key), note)
        self._evict(keep=key)
        return self.path(key)

    def get_or_build(
        self, key: str, facts: Mapping[str, str], build: Callable[[], bytes]
    ) -> tuple[bytes, bool]:
        """The plan, and whether it was found; of several processes one calls `build`.

        Raises what `build` raises, and EngineBuildFailed if another process builds for longer
        than `wait_s`.
        """
        found = self.get(key, facts)
        if found is not None:
            return found, True
        with self._lock(key):
            found = self.get(key, facts)
            if found is not None:
                return found, True
            data = build()
            self.put(key, data, facts)
            return data, False

    def timing_cache(self, name: str) -> bytes:
        """What `keep_timing_cache` kept under `name`; empty without any."""
        try:
            return (self._folder / f"{name}.timing").read_bytes()
        except OSError:
            return b""

    def keep_timing_cache(self, name: str, data: bytes) -> None:
        """Keeps a builder's timing cache; of two processes the later one wins."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / f"{name}.timing", data)

    def kernels(self, key: str) -> bytes:
        """The compiled kernels that `keep_kernels` kept for the plan of `key`; empty without."""
        try:
            data = self._kernels(key).read_bytes()
            os.utime(self._kernels(key))
        except OSError:
            return b""
        return data

    def keep_kernels(self, key: str, data: bytes) -> None:
        """Keeps what TensorRT for RTX compiled for the plan of `key`, replacing what was kept."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._kernels(key), data)
        self._evict(keep=key)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._wait_s
        # Never removed: a process could hold the lock of a file that another no longer sees.
        with (self._folder / f"{key}.lock").open("ab") as file:
            while not _try_lock(file.fileno()):
                if time.monotonic() > deadline:
                    raise EngineBuildFailed(
                        f"another process has been building {self.path(key)} for more than "
                        f"{self._wait_s:g} s: end it, or wait for it"
                    )
                time.sleep(_POLL_S)
            yield

    def _sidecar(self, key: str) -> Path:
        return self._folder / f"{key}.json"

    def _kernels(self, key: str) -> Path:
        return self._folder / f"{key}.kernels"

    def _evict(self, keep: str) -> None:
        files: list[tuple[int, int, Path]] = []
        for file in (*self._folder.glob("*.plan"), *self._folder.glob("*.kernels")):
            with suppress(OSError):  # another process may evict as well
                state = file.stat()
                files.append((state.st_mtime_ns, state.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= self._limit_bytes:
                return
            if file.stem == keep:
                continue
            if file.suffix == ".plan":
                self._sidecar(file.stem).unlink(missing_ok=True)
            file.unlink(missing_ok=True)
            total -= size


def default_cache(environ: Mapping[str, str] = os.environ) -> PlanCache:
    """In TRTQ_PLAN_CACHE (else ~/.cache/trtq/plans), of TRTQ_PLAN_CACHE_BYTES (else 20 GiB).

    Raises ConfigError for a number of bytes that is none.
    """
    folder = environ.get("TRTQ_PLAN_CACHE")
    given = environ.get("TRTQ_PLAN_CACHE_BYTES", str(_LIMIT_BYTES))
    if not given.isdecimal():
        raise ConfigError(f"TRTQ_PLAN_CACHE_BYTES={given!r} is no whole number of bytes")
    limit_bytes = int(given)
    return PlanCache(
        Path(folder) if folder else Path.home() / ".cache" / "trtq" / "plans", limit_bytes
    )


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` as a whole: readers see the old content or the new, never a part."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _note(data: bytes, facts: Mapping[str, str]) -> dict[str, Any]:
    return {
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "facts": dict(facts),
    }


def _try_lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
