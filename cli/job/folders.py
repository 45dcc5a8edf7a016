"""Folders of jobs that are killed outright: each is locked by its owner, and removed by the next job once the lock is free."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from partc.cli.job.processes import kill, naming
from partc.runtime.files.replace import remove

PREFIX = "partc-run-"
"""The begin of the names of these folders."""
MEMORY = Path("/dev/shm")
"""The place of folders in memory."""
_LOCK = "lock"
_YOUNG = 60.0
"""The seconds in which a new folder may still be without its lock."""


def sweep(place: Path) -> None:
    """Removes the folders of jobs that were killed outright, and kills the ranks that they left."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
            if not own or not folder.is_dir() or folder.is_symlink() or time.time() - about.st_mtime < _YOUNG:
                continue
            if not (folder / _LOCK).is_file():
                continue
            lock = locked(folder)
            if lock is not None:
                kill(naming(folder))
                remove_folder(folder)
                os.close(lock)


def remove_folder(folder: Path) -> None:
    """Removes a folder of a job, as far as the system lets it."""
    with contextlib.suppress(OSError):
        remove(folder)


def locked(folder: Path) -> int | None:
    """Returns a handle that holds the folder's lock; None where another process holds it, or the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        return None
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle
