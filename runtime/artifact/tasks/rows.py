"""The row of a rank file: its tasks in order, the values that they read of each other, and the positions of messages between them.

rank 1:  Recv(h.0) 1F0 Recv(h.1) 1B0 Send(h.0.grad) 1F1 ...     the main graph
         1F0 1B0 1F1 ...                                       its row
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from partc.runtime.artifact.format import DOMAIN, TAG
from partc.runtime.artifact.ranks import ranks_of
from partc.runtime.artifact.tasks.calls import Call, bodies_of, calls_of
from partc.runtime.artifact.tasks.task import Kind, Task, parse
from partc.runtime.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


@dataclass(frozen=True, eq=False)
class Row:
    """The calls of a rank file in their order. `functions`: the names of its bodies; `split` maps each output of a Split to its index.

    `places` maps the tag of a message or collective to the index of the last task before it, -1 if there is none; inside a task, to the
    index of that task.
    """

    calls: tuple[Call, ...]
    functions: tuple[str, ...]
    split: Mapping[str, int]
    places: Mapping[int, int]

    @cached_property
    def tasks(self) -> tuple[Task | None, ...]:
        """Each call as a task, by its function and microbatch; None where the function's name is not that of a task."""
        return tuple(_task(call) for call in self.calls)

    @cached_property
    def cells(self) -> tuple[str, ...]:
        """Each call as the row shows it: `0F3`."""
        return tuple(
            call.cell if task is None else str(task) for call, task in zip(self.calls, self.tasks, strict=True)
        )

    @cached_property
    def makers(self) -> dict[str, int]:
        """Maps each value to the index of the call that makes it."""
        return {name: at for at, call in enumerate(self.calls) for name in call.node.output}

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages that have tasks in this row."""
        return frozenset(task.stage for task in self.tasks if task is not None)

    def __str__(self) -> str:
        return " ".join(self.cells)


def row_of(model: ModelProto, where: str = "") -> Row | None:
    """Returns the row of a rank file, None if it has no tasks; ArtifactError where a call is not valid."""
    bodies = bodies_of(model)
    nodes = list(model.graph.node)
    calls = calls_of(nodes, bodies, where)
    if not calls and not bodies:
        return None
    places: dict[int, int] = {}
    split: dict[str, int] = {}
    before = 0
    for at, node in enumerate(nodes):
        if at in calls:
            places |= {tag + calls[at].microbatch: before for tag in _tags(calls[at].body.nodes)}
            before += 1
        elif node.op_type == "Split" and not node.domain:
            split |= {name: k for k, name in enumerate(node.output)}
        else:
            places |= dict.fromkeys(_tags([node]), before - 1)
    return Row(tuple(calls.values()), tuple(bodies), split, places)


def _tags(nodes: list[NodeProto] | tuple[NodeProto, ...]) -> Iterator[int]:
    for node in nodes:
        if node.domain == DOMAIN:
            yield from (one.i for one in node.attribute if one.name == TAG)


def _task(call: Call) -> Task | None:
    name = call.node.op_type
    try:
        return parse(f"{name[1:]}{name[:1]}{call.microbatch}")
    except ValueError:
        return None


@dataclass(frozen=True)
class RowsText:
    """The contents of a text of rows: the number of microbatches, and the cells of each rank."""

    microbatches: int
    rows: Mapping[int, tuple[str, ...]]


_HEAD = re.compile(r"# Schedule: .*   Stages: (\d{1,9})   Microbatches: (\d{1,9})", re.ASCII)
_STAGE = re.compile(r"# Stage (\d{1,9}): ranks? ([\d,-]+)(   .*)?", re.ASCII)
_LONGEST = 20
_ROW = re.compile(r"ranks? ([\d,-]+):( .*)?", re.ASCII)


def rows_of_text(text: str) -> RowsText:
    """Parses a text of rows such as `ir/schedule.txt`; ArtifactError, with a line's number, where it has no rows or contradicts itself.

    Cells must be tasks of the stages and microbatches that the head counts, a rank must have one row, and the head must place each stage on
    the ranks whose rows have its tasks.
    """
    counts: tuple[int, int] | None = None
    stages, homes, rows = dict[int, str](), dict[int, list[str]](), dict[int, tuple[str, ...]]()
    for number, line in enumerate(text.splitlines(), 1):
        if head := _HEAD.fullmatch(line):
            counts = int(head[1]), int(head[2])
        elif placed := _STAGE.fullmatch(line):
            stages[int(placed[1])] = placed[2]
        elif counts is not None and (row := _ROW.fullmatch(line)):
            cells, ranks = tuple((row[2] or "").split()), _ranks(row[1])
            if twice := sorted(rows.keys() & ranks):
                raise ArtifactError(f"line {number}: rank {twice[0]} has two rows")
            rows |= dict.fromkeys(ranks, cells)
            for stage in _stages(cells, *counts, f"line {number}"):
                homes.setdefault(stage, []).append(row[1])
    if counts is None or counts[1] < 1 or not rows:
        raise ArtifactError("it has no number of stages and microbatches, or no rows")
    on = cache(lambda texts: sorted({rank for one in texts for rank in _ranks(one)}))
    for stage in sorted({*range(min(counts[0], len(stages) + 1)), *stages, *homes}):
        said, have = (stages[stage],) if stage in stages else (), tuple(homes.get(stage, ()))
        if stage >= counts[0] or not said or on(said) != on(have):
            where = f"on {'ranks ' + said[0] if said else 'no rank'} by its head, which counts {counts[0]} stages"
            raise ArtifactError(
                f"stage {stage} is {where}; its tasks are in the rows of {' and '.join(have) or 'no rank'}"
            )
    return RowsText(counts[1], rows)


def _ranks(text: str) -> list[int]:
    try:
        return ranks_of(text)
    except ValueError as error:
        raise ArtifactError(str(error)) from None


def _stages(cells: Sequence[str], stages: int, microbatches: int, where: str) -> set[int]:
    """The stages of a row's tasks; ArtifactError where a cell is not a task of these stages and microbatches."""
    numbers = set[int]()
    for at, cell in enumerate(cells, 1):
        try:
            task = parse(cell)
        except ValueError as error:
            raise ArtifactError(f"{where}, cell {at}: '{cell[:_LONGEST]}' is not a task: {error}") from None
        if task.stage >= stages or task.microbatch >= microbatches:
            fact = f"{task}, and its head counts {stages} stages and {microbatches} microbatches"
            raise ArtifactError(f"{where}, cell {at}: {fact}")
        numbers.add(task.stage)
    return numbers


@dataclass(frozen=True)
class Reads:
    """The edges (earlier stage, later stage) along which stages read values of each other.

    `forward`: all edges; `gradients`: those along which cotangents come back.
    """

    forward: frozenset[tuple[int, int]]
    gradients: frozenset[tuple[int, int]]


def stage_reads(rows: list[Row]) -> Reads:
    """Returns the edges along which tasks read values of another stage's tasks, on any rank: a value has the same name on all ranks."""
    makers = {name: row.tasks[at] for row in rows for name, at in row.makers.items()}
    forward, gradients = set[tuple[int, int]](), set[tuple[int, int]]()
    for row in rows:
        for call, task in zip(row.calls, row.tasks, strict=True):
            for name in call.node.input:
                own = row.makers.get(name)
                maker = makers.get(name) if own is None else row.tasks[own]
                if maker is None or task is None or maker.microbatch != task.microbatch or maker.stage == task.stage:
                    continue
                if maker.kind is Kind.FORWARD and maker.stage < task.stage:
                    forward.add((maker.stage, task.stage))
                elif maker.kind is Kind.BACKWARD and task.kind is Kind.BACKWARD and task.stage < maker.stage:
                    gradients.add((task.stage, maker.stage))
    return Reads(frozenset(forward | gradients), frozenset(gradients))
