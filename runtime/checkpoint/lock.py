"""The lock of a folder of checkpoints: one job at a time may write there; readers do not lock.

The lock is that of the operating system (flock) on the file `.lock`, taken by the process of rank 0. The system releases it when the
process ends, for whatever reason, and NFS carries it between hosts. The file's text names the process that has the lock, for the message
that another job gets. The file is never removed: a job that ends normally empties it, a killed job leaves it unlocked, and the next job
locks it. If a job's launcher is killed, its ranks end some moments later, so a job that finds the folder locked tries for
`PATIENCE_SECONDS` before it is refused.

On a file system without locks the text alone decides: the lock is free if the text names a process of this host that no longer exists. A
process of another host cannot be checked, and the message says which file to remove.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import stat
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path

from ..errors import CheckpointError, printable, reason_of

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
PATIENCE_SECONDS = 5.0
_OPEN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_RETRY_SECONDS = 0.05
_TEXT_BYTES = 200
_HOLDER = re.compile(r"process (\d+) on (\S+), since .*")
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """The lock of one folder, from construction until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Takes the lock and creates a missing folder. CheckpointError names the job that has the lock, or the file that is in the way."""
        self.folder = folder
        self._file = folder / LOCK
        self._is_busy = self._is_own = False
        """Whether another job has the lock, and whether that job is this process, by another `Lock` object."""
        self._handle = self._taken()
        _held.add(self)

    def __del__(self) -> None:
        self.release()  # a trainer that is dropped without `close`, as in a cell of a notebook that runs twice

    def _taken(self) -> int:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self._tried()
            except CheckpointError:
                if self._is_own:
                    gc.collect()  # an unreferenced trainer of this process may have the lock
                    return self._tried()
                if not self._is_busy or time.monotonic() >= until:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _tried(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._file, _OPEN, 0o666)
        except OSError as error:
            fact = f"{self.folder}: no checkpoint can be written here: {reason_of(error)}"
            raise CheckpointError(f"{fact}\n  help: give a folder that you may write to") from None
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise CheckpointError(f"{self._file}: is not a regular file\n  help: remove it")
            self._lock(handle)
        except CheckpointError:
            os.close(handle)
            raise
        since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}, since {since}\n".encode(), 0)
        return handle

    def _lock(self, handle: int) -> None:
        """Locks an open file; CheckpointError where another job has the lock."""
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        except BlockingIOError:
            raise self._busy(_text(handle)) from None
        except OSError:
            pass  # a file system without locks
        text = _text(handle)
        if (holder := _HOLDER.fullmatch(text)) and not _is_gone(int(holder[1]), holder[2]):
            raise self._busy(text, f", or remove {self._file} if that job has ended")

    def _busy(self, text: str, remedy: str = "") -> CheckpointError:
        holder = _HOLDER.fullmatch(text)
        self._is_busy = True
        self._is_own = holder is not None and (int(holder[1]), holder[2]) == (os.getpid(), socket.gethostname())
        if self._is_own:
            remedy = f"{remedy}; it is a trainer of this very process: `close()` ends it"
        return CheckpointError(
            f"{self.folder}: another job writes its checkpoints here: {text or 'it does not say which'}\n"
            "  two jobs would replace and remove each other's checkpoints\n"
            f"  help: wait until it has ended, or give this one another folder{remedy}"
        )

    def release(self) -> None:
        """Releases the lock; its file stays, and is empty."""
        if getattr(self, "_handle", -1) >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, 0)
            self.forget()

    def forget(self) -> None:
        """Closes the handle and leaves the file unchanged.

        A forked process must do so, since its copy of the handle would hold the lock after this process has ended.
        """
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _in_child() -> None:
    for one in list(_held):
        one.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _text(handle: int) -> str:
    """Returns the text of the lock file, which names the process that has the lock."""
    text = os.pread(handle, _TEXT_BYTES, 0).decode(errors="replace")
    return printable(text.split("\n")[0])


def _is_gone(process: int, host: str) -> bool:
    """Whether a process is known to have ended; False for a process of another host."""
    if host != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False
