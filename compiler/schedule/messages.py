"""Where messages stand: one global order of events, of which every row is a part.

Tasks are ordered by the times at which a simulation begins them. Behind a task stand the messages with what it made, one for each stage
that reads it on other homes: right behind it in the sender's row, in the receiver's behind the tasks that begin no later than it does.

    rank 0: 0F0 0F0>1 0F1 0F1>1 0<1B0 0B0 0<1B1 0B1
    rank 1: 1<0F0 1F0 1<0F1 1B0 1B0>0 1F1 1B1 1B1>0

`0F0>1` sends what 0F0 made to stage 1, and `1<0F0` receives it. All rows agree on the order of events, so the first event that is not done
can always be done: nothing blocks, even if a Send waits until its receiver arrives there (`deadlock.py` plays that). A Receive stands
before its sender's task ends, so that it can be posted while both ranks compute; it is waited for by the task that reads.
Where a stage is on several homes some of them may do both, `0F0<>1`: a change of layout among them all, in one event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from partc.compiler.schedule.costs import Costs, unit_costs
from partc.compiler.schedule.schedule import Schedule
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.cells import Kind, Task


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
            for home in stages.homes[task.stage]:
                rows[home].append(task)
        else:
            for home, role in roles(stages, task.stage, reader):
                rows[home].append(Message(task, reader, role))
    return tuple(map(tuple, rows))


def readers(task: Task, stages: Stages) -> tuple[int, ...]:
    """The stages to which a message goes with what a task made."""
    if task.kind is Kind.FORWARD:
        there = {edge.target for edge in stages.edges if edge.source == task.stage}
    elif task.kind is Kind.BACKWARD:
        there = {edge.source for edge in stages.gradient_edges if edge.target == task.stage}
    else:
        there = set()
    return tuple(stage for stage in sorted(there) if stages.crosses(task.stage, stage))


def roles(stages: Stages, maker: int, reader: int) -> Iterator[tuple[int, Role]]:
    """The homes that take part in a message, and how: who has the value sends, unless to itself alone; who needs it receives."""
    having, needing = set(stages.homes[maker]), set(stages.homes[reader])
    for home in sorted(having | needing):
        sends, receives = home in having and needing != {home}, home in needing and having != {home}
        yield home, Role.BOTH if sends and receives else Role.SEND if sends else Role.RECEIVE


def message_counts(schedule: Schedule) -> dict[tuple[str, str], int]:
    """Between which homes how many messages go in a step, both ways together: 2m over an edge of a chain, 4m in a V."""
    stages = schedule.stages
    found: Counter[tuple[int, ...]] = Counter()
    pairs: dict[tuple[int, ...], tuple[str, str]] = {}
    for task in {task for row in schedule.rows for task in row}:
        for reader in readers(task, stages):
            ends = sorted([stages.homes[task.stage], stages.homes[reader]])
            key = (*ends[0], -1, *ends[1])
            found[key] += 1
            pairs[key] = (stages.label(*ends[0]), stages.label(*ends[1]))
    return {pairs[key]: found[key] for key in sorted(found)}


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
