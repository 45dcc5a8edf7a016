"""Rows of tasks and messages in one order of events, and where rows of any origin block.

Tasks are ordered by the times at which a simulation begins them. Behind a task stand the messages with what it made, one for each stage
that reads it on other homes: right behind it in the sender's row, in the receiver's behind the tasks that begin no later than it does.

    rank 0: 0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1
    rank 1: 1<0F0 1F0 1<0F1 1B0 1B0>0 1F1 1B1 1B1>0

`0F0>1` sends what 0F0 made to stage 1, and `1<0F0` receives it; where a stage is on several homes some may do both, `0F0<>1`. All rows
agree on the order of events, so the first event that is not done can always be done.

Two laws decide whether rows block. Strict: a Send waits until its receiver is at the Receive, a Receive until its sender is at the Send;
both then go on together. Buffered: a Send does not wait. Under either, an action that can run still can after any other one has run; so
whether rows block does not depend on the order in which they are played, and one play decides. Rows that pass the strict law pass every
other one.

    rank 0: 0F0 0F0>1 0F1 0F1>1 0<1B0 ...         0F1>1 waits for rank 1, which waits in 1B0>0 for rank 0: blocked
    rank 1: 1<0F0 1F0 1B0 1B0>0 1<0F1 ...
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from partc.compiler.errors import Problem
from partc.compiler.schedule.costs import Costs, unit_costs
from partc.compiler.schedule.grid import readers
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import Stages
from partc.compiler.schedule.validity import WrongCell, problems
from partc.runtime.artifact.tasks.task import Task

_LAW = "ranks take part in messages in one order: a Send may wait until its receiver has come to the Receive"
_READS = "a task reads what its own row has made or received before it"


class Role(StrEnum):
    """What a home does in a message."""

    SEND = ">"
    RECEIVE = "<"
    BOTH = "<>"


class Message(NamedTuple):
    """What `task` made, on its way to stage `reader`, as it appears in one row."""

    task: Task
    reader: int
    role: Role

    def __str__(self) -> str:
        if self.role is Role.RECEIVE:
            return f"{self.reader}<{self.task}"
        return f"{self.task}{self.role}{self.reader}"

    @property
    def event(self) -> tuple[Task, int]:
        """What is the same in all rows that take part."""
        return self.task, self.reader


Action: TypeAlias = Task | Message


def actions(schedule: Schedule, costs: Costs | None = None) -> tuple[tuple[Action, ...], ...]:
    """Per home its tasks and messages in the global order of a valid schedule; unit times where no costs are given."""
    stages = schedule.stages
    spans = simulate(schedule, costs or unit_costs(stages)).spans
    events: list[tuple[tuple[float, int, int, int], Task, int | None]] = []
    for k, (task, (begin, end)) in enumerate(spans.items()):
        events.append(((begin, 0, k, 0), task, None))
        behind_all = 1 if end > begin else 0  # what takes no time may be read by a task that begins with it
        events += [((begin, behind_all, k, 1), task, reader) for reader in readers(task, stages)]
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for _, task, reader in sorted(events):
        if reader is None:
            for home in stages.stage_ranks[task.stage]:
                rows[home].append(task)
        else:
            for home, role in roles(stages, task.stage, reader):
                rows[home].append(Message(task, reader, role))
    return tuple(map(tuple, rows))


def roles(stages: Stages, maker: int, reader: int) -> Iterator[tuple[int, Role]]:
    """The homes that take part in a message, and how: who has the value sends, unless to itself alone; who needs it receives."""
    having, needing = set(stages.stage_ranks[maker]), set(stages.stage_ranks[reader])
    for home in sorted(having | needing):
        sends, receives = home in having and needing != {home}, home in needing and having != {home}
        yield home, Role.BOTH if sends and receives else Role.SEND if sends else Role.RECEIVE


def most_unread(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Per home the most messages that have arrived and wait for the task that reads them: the buffers that a pipeline's edges need."""
    found = []
    for row in rows:
        waiting: set[tuple[Task, int]] = set()
        most = 0
        for action in row:
            if isinstance(action, Task):
                waiting = {one for one in waiting if one[1] != action.stage or one[0][1:] != action[1:]}
            elif action.role is not Role.SEND:
                waiting.add(action.event)
                most = max(most, len(waiting))
        found.append(most)
    return tuple(found)


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
                o
                for o in others
                if any(
                    isinstance(one, Message) and one.event == event and one.role is not Role.RECEIVE for one in rows[o]
                )
                and (event, o) not in sent
                and not _is_at(o, event)
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
