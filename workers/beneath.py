"""Opens a file below a folder without ever leaving it, whoever renames what meanwhile."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from producer.errors import FileMissing, PathNotAllowed
from producer.npy import reason

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a pipe that takes the file's place in the last moment must not block.
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_beneath(root: str, parts: Sequence[str], flags: int, path: str) -> int:
    """A descriptor of the regular file `root`/`parts`, each part opened from the one before.

    No part may be a symlink: the caller has resolved them, so one that is there now came in
    between. `path` is for messages. Raises PathNotAllowed for that, FileMissing if the file is
    not there, is no regular file or may not be opened.
    """
    opened = -1
    try:
        opened = os.open(root, _FOLDER)
        for part in parts[:-1]:
            inner = _open(part, _FOLDER, opened, path)
            os.close(opened)
            opened = inner
        name = parts[-1] if parts else "."
        # Asked before opening: opening a device may already do something.
        if not stat.S_ISREG(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
            raise FileMissing(f"{path!r} is not a regular file")
        fd = _open(name, flags | _FILE, opened, path)
    except (OSError, ValueError) as error:
        raise FileMissing(f"{path!r} cannot be opened: {reason(error)}") from error
    finally:
        if opened >= 0:
            os.close(opened)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileMissing(f"{path!r} is not a regular file")
    return fd


def _open(name: str, flags: int, folder: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError:
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            found = None
        if found is not None and stat.S_ISLNK(found.st_mode):
            raise PathNotAllowed(
                f"{path!r} became a symlink while it was opened: it is not followed"
            ) from None
        raise
