"""The state file of a bulk job: a header, then one line for every chunk that is done.

    {"version": 2, "model": ...}      what the job is, one JSON object: the model as published
                                      (without limits), the input files, rows, rows per task
    boot 0f3c...                      a run of the job began, on this boot of the machine
    done 17                           chunk 17 is in the output
    sync                              all before is on the disk, in the output as well as here
    finished                          every chunk is done and on the disk; all that follows the
                                      header once the job has ended without failed rows

After a crash of the job all whole lines count. After a crash of the machine the output may have
lost what only its memory held, so lines of an earlier boot count up to their last `sync`.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from producer.bulk.plan import ChunkPlan
from producer.errors import JobBusy, OutputFailed
from producer.npy import reason, write_all

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_LINE_BYTES = 1 << 20


class Journal:
    """The state file, locked from `open` to `close`. One job's thread uses it."""

    def __init__(self, path: Path, boot: str | None = None) -> None:
        self.path = path
        self._boot = boot
        self._fd = -1

    def open(self) -> None:
        """Creates and locks the file. Raises JobBusy if another job has it, OutputFailed."""
        if self._boot is None:
            self._boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "unknown"
        # The job that held the lock may have removed the file that was just opened.
        for _ in range(100):
            try:
                fd = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
                )
            except OSError as error:
                raise self._failed(error) from error
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OutputFailed(f"the job's state file {str(self.path)!r} is no regular file")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    self._fd = fd
                    self._end = os.fstat(fd).st_size
                    return
            except FileNotFoundError:
                pass
            except BlockingIOError as error:
                os.close(fd)
                raise JobBusy(
                    f"another bulk job writes this output (it holds {str(self.path)!r}); wait for "
                    "it or stop it"
                ) from error
            os.close(fd)
        raise JobBusy(f"other bulk jobs keep replacing {str(self.path)!r}")

    def header(self) -> dict[str, Any] | None:
        """The header, or None if there is none that can be read."""
        line = self._first_line()
        if not line:
            return None
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return header if isinstance(header, dict) else None

    def begin(self, header: dict[str, Any]) -> None:
        """Starts anew: nothing is done."""
        try:
            os.ftruncate(self._fd, 0)
        except OSError as error:
            raise self._failed(error) from error
        self._end = 0
        self._write(json.dumps(header) + f"\nboot {self._boot}\n")
        self._fsync()

    def replay(self, plan: ChunkPlan) -> None:
        """Marks what is done and drops the rest of the file: a torn line, lost chunks."""
        boot, end, durable = "", 0, 0
        for word, value, after in self._lines(plan):
            end = after
            if word == "boot":
                boot = value
            elif word in ("sync", "finished") or not word:
                durable = after
        keep = end if boot == self._boot else durable
        for word, value, after in self._lines(plan):
            if after > keep:
                break
            if word == "done":
                plan.mark_done(int(value))
            elif word == "finished":
                plan.mark_all_done()
        try:
            os.ftruncate(self._fd, keep)
        except OSError as error:
            raise self._failed(error) from error
        self._end = keep
        self._write(f"boot {self._boot}\n")

    def done(self, chunk: int) -> None:
        """Notes that the chunk is in the output."""
        self._write(f"done {chunk}\n")

    def sync(self) -> None:
        """Everything noted so far is on the disk; sync the output itself before."""
        self._write("sync\n")
        self._fsync()

    def finish(self) -> None:
        """Every chunk is done and on the disk; sync the output itself before."""
        self._end = len(self._first_line())
        # In place: whoever reads it after a crash in between sees this line first.
        self._write("finished\n")
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            raise self._failed(error) from error
        self._fsync()

    def remove(self) -> None:
        """Deletes the file while it is still locked."""
        try:
            os.unlink(self.path)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Unlocks; a file without a header is deleted, it says nothing."""
        if self._fd < 0:
            return
        if self._end == 0 and os.fstat(self._fd).st_nlink:
            os.unlink(self.path)
        os.close(self._fd)
        self._fd = -1

    def _first_line(self) -> bytes:
        """With its end; empty if there is no whole one."""
        try:
            line, end, _ = os.pread(self._fd, _MAX_LINE_BYTES, 0).partition(b"\n")
        except OSError as error:
            raise self._failed(error) from error
        return line + end if end else b""

    def _lines(self, plan: ChunkPlan) -> Iterator[tuple[str, str, int]]:
        """(word, value, offset behind the line) of whole, sane lines; the header has no word."""
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            after = len(file.readline(_MAX_LINE_BYTES))
            yield "", "", after
            while True:
                line = file.readline(200)
                word, _, value = line[:-1].decode("ascii", "replace").partition(" ")
                good = word in ("boot", "sync", "finished") or (
                    word == "done" and value.isdecimal() and int(value) < plan.chunks
                )
                if not line.endswith(b"\n") or not good:
                    return
                after += len(line)
                yield word, value, after

    def _write(self, text: str) -> None:
        data = text.encode()
        try:
            write_all(self._fd, data, self._end)
        except OSError as error:
            raise self._failed(error) from error
        self._end += len(data)

    def _fsync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> OutputFailed:
        return OutputFailed(f"the job's state file {str(self.path)!r}: {reason(error)}")
