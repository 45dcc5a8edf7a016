"""Plays rows of tasks and messages, and says where they block.

The strict law: a Send waits until its receiver is at the Receive, a Receive until its sender is at the Send; both then go on together. The
buffered law: a Send does not wait. Under either, an action that can run still can after any other one has run; so whether rows block does
not depend on the order in which they are played, and one play decides. Rows that pass the strict law pass every other one.

    rank 0: 0F0 0F0>1 0F1 0F1>1 0<1B0 ...         0F1>1 waits for rank 1, which waits in 1B0>0 for rank 0: blocked
    rank 1: 1<0F0 1F0 1B0 1B0>0 1<0F1 ...
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from partc.compiler.errors import Problem
from partc.compiler.schedule.cells import WrongCell
from partc.compiler.schedule.messages import Action, Message, Role
from partc.compiler.schedule.stages import Stages
from partc.compiler.schedule.validity import problems
from partc.runtime.artifact.cells import Task

_LAW = "ranks take part in messages in one order: a Send may wait until its receiver has come to the Receive"
_READS = "a task reads what its own row has made or received before it"


@dataclass(frozen=True)
class Blocked:
    """A row that cannot go on at a cell, because these other rows have not come to the same event."""

    row: int
    cell: int
    absent: tuple[int, ...]


def blocked(rows: Sequence[Sequence[Action]], buffered: bool = False) -> list[Blocked]:
    """Where rows stop for good; empty where all get to their ends."""
    taking: dict[Hashable, list[int]] = {}
    for r, row in enumerate(rows):
        for action in row:
            taking.setdefault(_event(action), []).append(r)
    at, sent = [0] * len(rows), set[tuple[Hashable, int]]()

    def absent(r: int) -> tuple[int, ...]:
        """The rows for which a row waits at its next action; empty if it can go on."""
        action = rows[r][at[r]]
        event = _event(action)
        others = [other for other in taking[event] if other != r]
        if buffered and isinstance(action, Message):
            return tuple(
                o for o in others if _sends(rows[o], event) and (event, o) not in sent and not _is_at(o, event)
            )
        return tuple(other for other in others if not _is_at(other, event))

    def _is_at(r: int, event: Hashable) -> bool:
        return at[r] < len(rows[r]) and _event(rows[r][at[r]]) == event

    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row) and not absent(r):
                action = row[at[r]]
                event = _event(action)
                loose = buffered and isinstance(action, Message)
                for one in [r] if loose else taking[event]:
                    sent.add((event, one))
                    at[one] += 1
                moved = True
    return [Blocked(r, at[r], absent(r)) for r, row in enumerate(rows) if at[r] < len(row)]


def validate_actions(rows: Sequence[Sequence[Action]], stages: Stages, where: str = "schedule") -> list[Problem]:
    """All that is wrong with rows of tasks and messages: a message that one end lacks, one read before it is there, a deadlock."""
    wrong = [*_unmatched(rows), *_unread(rows, stages)] or list(_deadlocks(rows, stages))
    return problems(wrong, where, stages, [list(map(str, row)) for row in rows])


def _unmatched(rows: Sequence[Sequence[Action]]) -> Iterator[WrongCell]:
    count: dict[tuple[Hashable, Role], list[tuple[int, int]]] = {}
    for r, row in enumerate(rows):
        for cell, action in enumerate(row):
            if isinstance(action, Message):
                count.setdefault((action.event, action.role), []).append((r, cell))
                if len([place for place in count[action.event, action.role] if place[0] == r]) > 1:
                    yield WrongCell(r, cell, f"{action} appears twice", "a message goes once", "remove one of the two")
    for (event, role), places in count.items():
        ends = {other for other in (Role.SEND, Role.RECEIVE, Role.BOTH) if (event, other) in count}
        if ends == {role} and role is not Role.BOTH:
            r, cell = places[0]
            end = "Receive" if role is Role.SEND else "Send"
            yield WrongCell(
                r, cell, f"{rows[r][cell]} has no {end} in any row", "a message has two ends", f"add the {end}"
            )


def _unread(rows: Sequence[Sequence[Action]], stages: Stages) -> Iterator[WrongCell]:
    for r, row in enumerate(rows):
        there: set[Hashable] = set()
        for cell, action in enumerate(row):
            there.add(action if isinstance(action, Task) else action.event)
            if isinstance(action, Task):
                for need in stages.needs(action):
                    crosses = stages.crosses(need.stage, action.stage)
                    if ((need, action.stage) if crosses else need) not in there:
                        fact = f"{action} reads what {need} makes, which is not there yet"
                        yield WrongCell(
                            r, cell, fact, _READS, f"move {action} after {'the Receive' if crosses else need}"
                        )
            elif action.role is not Role.RECEIVE and action.task not in there:
                fact = f"{action} sends what {action.task} makes, which is not there yet"
                yield WrongCell(r, cell, fact, _READS, f"move it after {action.task}")


def _deadlocks(rows: Sequence[Sequence[Action]], stages: Stages) -> Iterator[WrongCell]:
    found = blocked(rows)
    stops = {one.row: str(rows[one.row][one.cell]) for one in found}
    for one in found:
        waits = ", ".join(
            f"{stages.label(other)}, which {f'waits in {stops[other]}' if other in stops else 'has ended'}"
            for other in one.absent
        )
        fact = f"deadlock: {stops[one.row]} waits for {waits}"
        yield WrongCell(
            one.row, one.cell, fact, _LAW, "put each message right behind the task that makes it, in both rows"
        )


def _event(action: Action) -> Hashable:
    return action if isinstance(action, Task) else action.event


def _sends(row: Sequence[Action], event: Hashable) -> bool:
    return any(isinstance(one, Message) and one.event == event and one.role is not Role.RECEIVE for one in row)
