"""The status board: what each rank is doing, readable by the launcher even after the rank was killed.

A file of 16 bytes a rank: the number of the step and the index of the action, as two little-endian 64-bit integers. Each rank
maps the file into its memory and writes its own slot before each action. A launcher creates the file and names it in
`PARTC_BOARD`.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

VARIABLE = "PARTC_BOARD"
SLOT = struct.Struct("<qq")
IDLE = -1
AGREEING = -2

Buffer: TypeAlias = "bytearray | mmap.mmap"


@dataclass(frozen=True)
class Board:
    """Where one rank writes: `SLOT.pack_into(board.buffer, board.offset, step, action)`."""

    buffer: Buffer
    offset: int


def create_board(file: Path, ranks: int) -> None:
    """A board on which every rank is idle."""
    file.write_bytes(SLOT.pack(0, IDLE) * ranks)


def open_board(rank: int) -> Board:
    """The slot of a rank on the board that the environment names; where there is none, a slot that nobody reads."""
    name = os.environ.get(VARIABLE)
    if name:
        try:
            with open(name, "r+b") as stream:
                mapped = mmap.mmap(stream.fileno(), 0)
        except (OSError, ValueError):
            # Another machine of the job has no such file.
            return Board(bytearray(SLOT.size), 0)
        if len(mapped) >= SLOT.size * (rank + 1):
            return Board(mapped, SLOT.size * rank)
    return Board(bytearray(SLOT.size), 0)


def read_board(file: Path) -> list[tuple[int, int]]:
    """Step and action of every rank."""
    return [(step, action) for step, action in SLOT.iter_unpack(file.read_bytes())]
