"""Limits for text files of unknown origin: bytes are counted before they are read, values before memory is taken for them.

    read_json(path, MANIFEST)      the data of a JSON file within the limits of a manifest; ValueError says which one it exceeds

A list of JSON takes three bytes in a file and about sixty in memory, a list of ranks `"0-65535"` nine bytes and half a megabyte. So each
reader has a row here, and a text that stands for more than its row allows is refused before memory is taken for it. `Budget` counts
what short forms stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .regular import read_regular


@dataclass(frozen=True)
class Limit:
    """What a kind of file has at most: bytes; lists, mappings and their items; digits of a whole number."""

    bytes: int
    values: int
    digits: int = 18


MANIFEST = Limit(bytes=1 << 29, values=1 << 23)
RUN_LIST = Limit(bytes=1 << 28, values=1 << 23)
CHECKPOINT_INDEX = Limit(bytes=1 << 30, values=1 << 24, digits=4300)
CHECKPOINT_LIST = Limit(bytes=1 << 26, values=1 << 20)
PROFILE = Limit(bytes=1 << 28, values=1 << 24)
TRACE = Limit(bytes=1 << 30, values=1 << 16)
"""Values are those of one line."""
PROGRESS = Limit(bytes=1 << 16, values=1 << 10)
SCHEDULE_BYTES = 1 << 26
"""A text of a schedule's rows has at most so many bytes."""
MOST_NODES = 1 << 20
"""A model has at most so many nodes, those of its bodies and, once for each call, of its functions included."""
MOST_PROGRAMS = 64
"""An artifact has at most so many programs."""
LISTED_RANKS = 1 << 22
"""The lists of ranks of a manifest stand for at most so many ranks, equal lists counted once; so do the groups of a program."""


@dataclass
class Budget:
    """Counts what short forms of one file stand for; ValueError where that is more than `most`. `known` has what is made already."""

    most: int
    what: str
    taken: int = 0
    known: dict[str, list[int]] = field(default_factory=dict)

    def take(self, count: int) -> None:
        """Counts so many more, which are not made yet."""
        if self.taken + count > self.most:
            raise ValueError(f"with this the file lists more than {self.most:,} {self.what}")
        self.taken += count


def read_json(path: str | Path, limit: Limit) -> object:
    """The data of a JSON file; OSError where it is not a regular file or too long, ValueError as `parse_json`."""
    return parse_json(read_regular(path, limit.bytes), limit)


def parse_json(text: bytes, limit: Limit) -> object:
    """The data of a JSON text; ValueError where it is not JSON, or has more values or digits than allowed, or is nested too deeply."""
    count = sum(map(text.count, (b",", b"[", b"{")))
    if count > limit.values:
        raise ValueError(f"it has {count:,} values; at most {limit.values:,} are read")
    try:
        return json.loads(text.decode("utf-8"), parse_int=_integer_of_digits(limit.digits))
    except RecursionError:
        raise ValueError("lists and mappings are nested too deeply") from None


def read_text(path: str | Path, most: int) -> str:
    """The text of a UTF-8 file of at most so many bytes; OSError where it is longer or not a regular file, ValueError if not UTF-8."""
    return read_regular(path, most).decode("utf-8")


def _integer_of_digits(most: int) -> Callable[[str], int]:
    def read(digits: str) -> int:
        if len(digits) > most:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    return read
