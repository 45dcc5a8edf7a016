"""A rank that leaves while others expect it tells them, whatever ends it: an error that nobody catches, sys.exit, the end of the script.

    with partc.runtime.load("build") as program:
        program(x=images)
        serve(program)      # raises on rank 1: the next step of the others is a RankError that names it

What an exception leaves unsaid (SystemExit, KeyboardInterrupt) is told with the line of the user's file that it comes from. A rank that
leaves between two steps fails nobody's step: only who waits for what it never takes part in is told.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import sysconfig
import traceback
import weakref
from pathlib import Path
from types import TracebackType
from typing import Protocol

from .errors import PartcError

_OWN = tuple(str(Path(__file__).resolve().parents[1] / name) + os.sep for name in ("runtime", "cli", "compiler"))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class Leaving(Protocol):
    """What can tell the other ranks that this one leaves."""

    rank: int

    def leave(self, message: str) -> None:
        """Tell them; once is enough."""
        ...


def expected(transport: Leaving) -> None:
    """From here on the others wait for this rank; should the process end before that is over, they are told."""
    if not _excepthooks:
        atexit.register(_leave_all, "its script has ended")
        _excepthooks.append(sys.excepthook)
        sys.excepthook = _raised
    _expected.add(transport)


def said(rank: int, error: BaseException) -> str:
    """What the others are told of a rank that an error ends: its own words where they are made for that, else who, what and where."""
    if isinstance(error, PartcError):
        return str(error)
    return f"rank {rank} has left the job: {described(error)}"


def described(error: BaseException) -> str:
    """An exception with its text and its place in the user's files.

    SystemExit(3) at records.py:8
    """
    text = ", ".join(map(repr, error.args)) if isinstance(error, SystemExit) else str(error)
    bare = f"({text})" if isinstance(error, SystemExit) else f": {text}" if text else ""
    return f"{type(error).__name__}{bare}{_place(error)}"


def _place(error: BaseException) -> str:
    """The innermost frame outside of partc and what is installed, such as ` at records.py:8`; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_OWN, *_INSTALLED, "<")):
            return f" at {frame.filename}:{frame.lineno}"
    return ""


_expected: weakref.WeakSet[Leaving] = weakref.WeakSet()
_excepthooks: list[object] = []


def _leave_all(why: str) -> None:
    for transport in list(_expected):
        with contextlib.suppress(Exception):
            transport.leave(f"rank {transport.rank} has left the job: {why}")


def _raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _leave_all(described(error))
    hook = _excepthooks[0]
    if callable(hook):
        hook(kind, error, trace)
