"""Informs the other ranks when a rank leaves while they expect it, whatever the cause: an uncaught error, sys.exit, the end of the script.

    with partc.runtime.load("build") as program:
        program(x=images)
        serve(program)      # raises on rank 1: the next step of the others is a RankError that names it

The message names the line of the user's file that ended the rank. A rank that leaves between two steps fails no step by that: only a rank
that waits for communication in which the leaving rank takes no part gets the error.
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
from ..user_code import user_error


class Leaving(Protocol):
    """A transport that can inform the other ranks that this one leaves."""

    rank: int

    def leave(self, message: str) -> None:
        """Tells the other ranks; one call is enough."""
        ...


def expected(transport: Leaving) -> None:
    """Notes that other ranks wait for this one: if its process ends before the transport is closed, they get a message."""
    if not _excepthooks:
        atexit.register(_leave_all, "its script has ended")
        _excepthooks.append(sys.excepthook)
        sys.excepthook = _raised
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_expected.clear)  # a fork is not a rank: its end is not reported
    _expected.add(transport)


def leaving_message(rank: int, error: BaseException) -> str:
    """Returns the message about a rank that `error` ends: the text of partc's own errors, else the rank, the error and its line."""
    if isinstance(error, PartcError):
        return str(error)
    return f"rank {rank} has left the job: {user_error(error, 'its script').head}"


_expected: weakref.WeakSet[Leaving] = weakref.WeakSet()
_excepthooks: list[object] = []


def _leave_all(why: str) -> None:
    for transport in list(_expected):
        with contextlib.suppress(Exception):
            transport.leave(f"rank {transport.rank} has left the job: {why}")


def _raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _leave_all(user_error(error, "its script").head)
    hook = _excepthooks[0]
    if callable(hook):
        hook(kind, error, trace)
