"""The status board: the current step and action of each rank, which the launcher can read even after the rank was killed.

The board is a file with 16 bytes for each rank: the number of the step and the index of the action, as two little-endian 64-bit integers.
Each rank maps the file into memory and writes its own slot before each action. A launcher creates the file and names it in `PARTC_BOARD`.
The same folder has the file `pids`, 8 bytes for each rank, where each rank of the machine writes its process id when it begins; and the
file `tasks`, 256 bytes for each rank, where a rank writes which of the user's code it runs, while it runs it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..files.regular import read_regular, text_of_system
from ..files.writers import open_to_change, write_new

VARIABLE = "PARTC_BOARD"
PIDS = "pids"
TASKS = "tasks"
_TASK = 256
_own_task: list[memoryview] = []
SLOT = struct.Struct("<qq")
_PID = struct.Struct("<q")
IDLE = -1
AGREEING = -2
STARTING = -3
"""The action of a rank that has not joined the others yet: it loads Python, or MPI begins."""

Buffer: TypeAlias = "bytearray | mmap.mmap"


@dataclass(frozen=True)
class Board:
    """The slot of one rank: `SLOT.pack_into(board.buffer, board.offset, step, action)`."""

    buffer: Buffer
    offset: int


def create_board(file: Path, ranks: int) -> None:
    """Creates a board on which every rank is starting."""
    write_new(file, SLOT.pack(0, STARTING) * ranks)


def note_joined(rank: int) -> None:
    """Writes that the rank has joined the others: MPI has begun."""
    board = open_board(rank)
    SLOT.pack_into(board.buffer, board.offset, 0, IDLE)


def open_board(rank: int) -> Board:
    """Returns the slot of a rank on the board that the environment names; without a board, a slot that is never read."""
    name = os.environ.get(VARIABLE)
    if name:
        try:
            with open_to_change(name) as stream:
                mapped = mmap.mmap(stream.fileno(), 0)
        except (OSError, ValueError):
            # Another machine of the job has no such file.
            return Board(bytearray(SLOT.size), 0)
        if len(mapped) >= SLOT.size * (rank + 1):
            return Board(mapped, SLOT.size * rank)
    return Board(bytearray(SLOT.size), 0)


def read_board(file: Path) -> list[tuple[int, int]]:
    """Returns the step and the action of every rank, in order of ranks."""
    return [(step, action) for step, action in SLOT.iter_unpack(read_regular(file))]


def create_pids(folder: Path, ranks: int) -> None:
    """Creates the file of process ids, all of them still unknown (0)."""
    write_new(folder / PIDS, _PID.pack(0) * ranks)


def read_pids(folder: Path) -> list[int]:
    """Returns the process ids in a run's folder, in order of ranks; 0 where one is not known."""
    return [pid for (pid,) in _PID.iter_unpack(read_regular(folder / PIDS))]


def write_pid(folder: Path, rank: int) -> None:
    """Writes this process's id as that of the rank."""
    with open_to_change(folder / PIDS) as file:
        file.seek(_PID.size * rank)
        file.write(_PID.pack(os.getpid()))


def create_tasks(folder: Path, ranks: int) -> None:
    """Creates the file of the user's code that each rank runs, all entries empty."""
    write_new(folder / TASKS, bytes(_TASK * ranks))


def open_task(folder: Path, rank: int) -> None:
    """Opens the rank's entry in the tasks file, into which `note_task` of this process writes from then on."""
    with open_to_change(folder / TASKS) as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0))
    _own_task[:] = [whole[_TASK * rank : _TASK * (rank + 1)]]


def note_task(text: str) -> None:
    """Writes the description of the user's code that begins to run; an empty text after it has returned."""
    if _own_task:
        _own_task[0][:] = text.encode()[:_TASK].ljust(_TASK, b"\0")


def read_task(folder: Path, rank: int) -> str:
    """Returns the user's code that a rank runs, or ran when the rank ended; empty where there is none."""
    try:
        content = read_regular(folder / TASKS)[_TASK * rank : _TASK * (rank + 1)]
    except OSError:
        return ""
    return content.rstrip(b"\0").decode(errors="ignore")


def processes() -> Mapping[int, int]:
    """Maps each rank to its process id as far as known from the launcher's folder; empty without such a folder."""
    try:
        found = read_pids(Path(os.environ[VARIABLE]).parent)
    except (KeyError, OSError):
        return {}
    return {rank: pid for rank, pid in enumerate(found) if pid}


def states(pids: Sequence[int]) -> list[str]:
    """Returns the letter of each process's state in /proc; empty where it has ended, `?` where the system has no /proc."""
    return [_state(Path(f"/proc/{pid}/stat")) for pid in pids]


def _state(file: Path) -> str:
    try:
        return text_of_system(file).rpartition(")")[2].split()[0]
    except IndexError:
        return "" if file.parent.parent.joinpath("self", "stat").exists() else "?"
