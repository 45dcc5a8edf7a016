"""Finds the computations of a step during which messages or collectives are under way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..program.steps import PostRecv, Segment, Send, StartCollective, Step, Update, WaitCollective, WaitRecv


def during_messages(steps: Sequence[Step], at_once: Collection[int]) -> set[int]:
    """The indices of segments and updates while something may be under way.

    A send may be, until the step ends. A collective that is `at_once` begins with its wait.
    """
    found: set[int] = set()
    coming: set[int] = set()
    sent = False
    for index, step in enumerate(steps):
        match step:
            case Segment() | Update() if sent or coming:
                found.add(index)
            case Send():
                sent = True
            case PostRecv():
                coming.add(step.tag)
            case WaitRecv():
                coming.discard(step.tag)
            case StartCollective() if step.call.tag not in at_once:
                sent |= step.call.leaves
                coming.add(step.call.tag)
            case WaitCollective():
                coming.discard(step.call.tag)
    return found
