"""The folder that a launching process shares with its ranks on this host: the status board and their process ids."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import tempfile
from pathlib import Path
from types import TracebackType

from partc.runtime.board import create_board, read_board

BOARD = "board"
PIDS = "pids"

_PID = struct.Struct("<q")


class Scratch:
    """The folder of one run; as a context it removes itself and ends every rank that is still there."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.folder = Path(tempfile.mkdtemp(prefix="partc-run-"))
        create_board(self.folder / BOARD, ranks)
        (self.folder / PIDS).write_bytes(_PID.pack(0) * ranks)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_ranks()
        shutil.rmtree(self.folder, ignore_errors=True)

    def board(self) -> list[tuple[int, int]]:
        """Step and action of every rank, as the runtime wrote them last."""
        return read_board(self.folder / BOARD)

    def pids(self) -> list[int]:
        """The process id of every rank; 0 where it has not begun, or runs on another host."""
        return read_pids(self.folder)

    def end_ranks(self) -> None:
        """Kills the ranks that outlived their launcher; only processes whose command line names this folder."""
        for pid in self.pids():
            if pid and self._is_ours(pid):
                os.kill(pid, signal.SIGKILL)

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.fsencode(self.folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False


def read_pids(folder: Path) -> list[int]:
    """The process ids in a run's folder, in order of ranks."""
    return [pid for (pid,) in _PID.iter_unpack((folder / PIDS).read_bytes())]


def write_pid(folder: Path, rank: int) -> None:
    """Notes that this process is the rank."""
    with (folder / PIDS).open("r+b") as file:
        file.seek(_PID.size * rank)
        file.write(_PID.pack(os.getpid()))
