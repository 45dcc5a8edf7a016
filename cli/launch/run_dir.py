"""The folders of one job: the status board, the ranks' process ids, and the files of the launcher and MPI.

They are removed at the end of the job. If partc is killed, its guard removes them, and if the guard is killed as well, the next job
does: the owner of a folder holds a lock in it, which the system releases when the owner ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from partc.cli.job.folders import MEMORY, PREFIX, locked, remove_folder, sweep
from partc.cli.job.job import BOARD
from partc.cli.job.processes import kill, naming
from partc.cli.launch import guard
from partc.runtime.job.status_board import create_board, create_pids, create_tasks, read_board, read_pids


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
        self.folder = self._locked_folder(Path(tempfile.mkdtemp(prefix=PREFIX)))
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.notify_guard(self.folder)
        with contextlib.suppress(OSError):
            if MEMORY.is_dir():
                sweep(MEMORY)
                self.memory = MEMORY / self.folder.name
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
            remove_folder(folder)
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
        lock = locked(folder)
        self._locks += [] if lock is None else [lock]
        return folder


@contextlib.contextmanager
def folder_of_copies() -> Iterator[Path | None]:
    """A folder in this host's memory for copies of a training's state, removed at the end; None where the system has no such memory.

    The name holds on all hosts, where ranks create it. The folder is locked on each host: what is left by a job that was killed, and on
    hosts that were lost, is removed by the next job there.
    """
    folder = MEMORY / f"{PREFIX}copies-{secrets.token_hex(16)}"
    if not MEMORY.is_dir():
        yield None
        return
    folder.mkdir(mode=0o700)
    lock = locked(folder)
    try:
        yield folder
    finally:
        remove_folder(folder)
        if lock is not None:
            os.close(lock)
