"""Limits for text files of unknown origin: a file's bytes and values are counted before memory is allocated for them.

    read_json(path, MANIFEST)    # the data of a JSON file within the limits of a manifest; ValueError says which one it exceeds

A JSON list takes three bytes in a file and about sixty in memory; a list of ranks `"0-65535"` takes nine bytes and half a megabyte. So each
kind of file has its limits here, and a text that would expand to more is refused before memory is allocated. `Budget` counts the expanded
sizes of short forms.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .regular import read_regular


@dataclass(frozen=True)
class Limit:
    """The limits of a kind of file: bytes; lists, mappings and their items; digits of an integer."""

    bytes: int
    values: int
    digits: int = 18


MANIFEST = Limit(bytes=1 << 29, values=1 << 23)
RUN_LIST = Limit(bytes=1 << 28, values=1 << 23)
CHECKPOINT_INDEX = Limit(bytes=1 << 30, values=1 << 24, digits=4300)
CHECKPOINT_LIST = Limit(bytes=1 << 26, values=1 << 20)
PROFILE = Limit(bytes=1 << 28, values=1 << 24)
TRACE = Limit(bytes=1 << 30, values=1 << 16)
"""The limit of values is for each line."""
PROGRESS = Limit(bytes=1 << 16, values=1 << 10)
SCHEDULE_BYTES = 1 << 26
"""The largest size in bytes of a text with a schedule's rows."""
MOST_NODES = 1 << 20
"""The largest number of nodes of a model, including those of bodies and, once for each call, those of functions."""
MOST_PROGRAMS = 64
"""The largest number of programs in an artifact."""
LISTED_RANKS = 1 << 22
"""The largest number of ranks in the expanded lists of ranks of a manifest, equal lists counted once; also for a program's groups."""


@dataclass
class Budget:
    """Counts the items to which short forms in one file expand; ValueError beyond `most`. `known` caches the expanded lists."""

    most: int
    what: str
    taken: int = 0
    known: dict[str, list[int]] = field(default_factory=dict)

    def take(self, count: int) -> None:
        """Counts `count` more items before they are created."""
        if self.taken + count > self.most:
            raise ValueError(f"with this the file lists more than {self.most:,} {self.what}")
        self.taken += count


def read_json(path: str | Path, limit: Limit) -> object:
    """Returns the data of a JSON file; OSError where it is not a regular file or too long, ValueError as for `parse_json`."""
    return parse_json(read_regular(path, limit.bytes), limit)


def parse_json(text: bytes, limit: Limit) -> object:
    """Returns the data of a JSON text; ValueError where it is invalid, nested too deeply, or has more values or digits than allowed."""
    count = sum(map(text.count, (b",", b"[", b"{")))
    if count > limit.values:
        raise ValueError(f"it has {count:,} values; at most {limit.values:,} are read")
    try:
        return json.loads(text.decode("utf-8"), parse_int=_integer_of_digits(limit.digits))
    except RecursionError:
        raise ValueError("lists and mappings are nested too deeply") from None


def read_text(path: str | Path, most: int) -> str:
    """Returns the text of a UTF-8 file; OSError where it is longer than `most` bytes or not a regular file, ValueError if not UTF-8."""
    return read_regular(path, most).decode("utf-8")


def _integer_of_digits(most: int) -> Callable[[str], int]:
    def read(digits: str) -> int:
        if len(digits) > most:
            raise ValueError(f"a number of {len(digits)} digits")
        return int(digits)

    return read
