"""A rank that leaves while others expect it tells them, whatever ends it: an error that nobody catches, sys.exit, the end of the script.

    with partc.runtime.load("build") as program:
        program(x=images)
        serve(program)      # raises on rank 1: the next step of the others is a RankError that names it

What ended it is told with the line of the user's file that it comes from. A rank that leaves between two steps fails nobody's step: only
who waits for what it never takes part in is told.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from ..errors import PartcError
from ..user_code import told


class Leaving(Protocol):
    """What can tell the other ranks that this one leaves."""

    rank: int

    def leave(self, message: str) -> None:
        """Tell them; once is enough."""
        ...


def expected(transport: Leaving) -> None:
    """Note that other ranks wait for this one: if its process ends before the transport is closed, they get a message."""
    if not _excepthooks:
        atexit.register(_leave_all, "its script has ended")
        _excepthooks.append(sys.excepthook)
        sys.excepthook = _raised
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_expected.clear)  # a fork is no rank: its end tells nobody
    _expected.add(transport)


def said(rank: int, error: BaseException) -> str:
    """The message about a rank that an error ends: the text of partc's own errors; of others the rank, the error and its line."""
    if isinstance(error, PartcError):
        return str(error)
    return f"rank {rank} has left the job: {told(error, 'its script').head}"


_expected: weakref.WeakSet[Leaving] = weakref.WeakSet()
_excepthooks: list[object] = []


def _leave_all(why: str) -> None:
    for transport in list(_expected):
        with contextlib.suppress(Exception):
            transport.leave(f"rank {transport.rank} has left the job: {why}")


def _raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _leave_all(told(error, "its script").head)
    hook = _excepthooks[0]
    if callable(hook):
        hook(kind, error, trace)
