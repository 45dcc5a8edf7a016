"""The folders of one job: the status board, the ranks' process ids, and the files of the launcher and MPI.

They are removed at the end of the job. If partc is killed, its guard removes them, and if the guard is killed as well, the next job
does: the owner of a folder holds a lock in it, which the system releases when the owner ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from partc.cli.job.job import BOARD
from partc.cli.job.processes import kill, naming
from partc.cli.launch import guard
from partc.runtime.files.replace import remove
from partc.runtime.job.status_board import create_board, create_pids, create_tasks, read_board, read_pids

_PREFIX = "partc-run-"
_LOCK = "lock"
_MEMORY = Path("/dev/shm")
_YOUNG = 60.0
"""The seconds in which a new folder may still be without its lock."""


class RunDir:
    """The folders of one run; at its exit, the context removes them and kills every rank that is still running."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.memory: Path | None = None
        """A folder in memory, for the memory that MPI's processes share; None where the system has none."""
        self.ended: dict[int, tuple[str, str]] = {}
        """Maps each rank that partc itself killed to a description of that for the failure's message, and its help."""
        self._pids = [0] * ranks
        self._locks: list[int] = []
        sweep(Path(tempfile.gettempdir()))
        self.folder = self._locked_folder(Path(tempfile.mkdtemp(prefix=_PREFIX)))
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.notify_guard(self.folder)
        with contextlib.suppress(OSError):
            if _MEMORY.is_dir():
                sweep(_MEMORY)
                self.memory = _MEMORY / self.folder.name
                self.notify_guard(self.memory)
                self.memory.mkdir(mode=0o700)
                self._locked_folder(self.memory)
        create_board(self.folder / BOARD, ranks)
        create_pids(self.folder, ranks)
        create_tasks(self.folder, ranks)

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_ranks()
        for folder in self.folders():
            _remove(folder)
        for lock in self._locks:
            os.close(lock)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(2.0)

    def folders(self) -> list[Path]:
        """Returns both folders, or only one where there is no folder in memory."""
        return [self.folder, *([self.memory] if self.memory else [])]

    def notify_guard(self, what: Path | int) -> None:
        """Sends the guard a folder, or the process id of the launcher."""
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(os.fsencode(f"{what}\n"))
            self._guard.stdin.flush()

    def board(self) -> list[tuple[int, int]]:
        """Returns step and action of every rank, as the runtime wrote them last."""
        return read_board(self.folder / BOARD)

    def pids(self) -> list[int]:
        """Returns every rank's process id; 0 where it has not begun, or runs on another host. Without the file, the last known ids."""
        with contextlib.suppress(OSError):
            self._pids = read_pids(self.folder)
        return self._pids

    def end_ranks(self) -> None:
        """Kills the ranks that outlived their launcher; only processes whose command line names this folder."""
        kill(naming(self.folder))

    def _locked_folder(self, folder: Path) -> Path:
        """Locks the folder, and returns it."""
        lock = _locked(folder)
        self._locks += [] if lock is None else [lock]
        return folder


def sweep(place: Path) -> None:
    """Removes the folders of jobs that were killed outright, and kills the ranks that they left."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = folder.lstat()
            own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
            if not own or not folder.is_dir() or folder.is_symlink() or time.time() - about.st_mtime < _YOUNG:
                continue
            if not (folder / _LOCK).is_file():
                continue
            lock = _locked(folder)
            if lock is not None:
                kill(naming(folder))
                _remove(folder)
                os.close(lock)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        remove(folder)


def _locked(folder: Path) -> int | None:
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
