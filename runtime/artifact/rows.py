"""The row of a rank file: its tasks in their order, what each reads of others, and where messages stand between them.

rank 1:  Recv(h.0) 1F0 Recv(h.1) 1B0 Send(h.0.grad) 1F1 ...     the main graph
         1F0 1B0 1F1 ...                                       its row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import ArtifactError
from .cells import Kind, Task, parse
from .format import DOMAIN, TAG
from .tasks import Call, bodies_of, calls_of

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


@dataclass(frozen=True, eq=False)
class Row:
    """The calls of a rank file in their order. `functions`: the bodies that it has; `split`: by value the part of a Split that it is.

    `places`: by the tag of a message or a collective how many tasks stand before it; of one inside of a task, the task's own place.
    """

    calls: tuple[Call, ...]
    functions: tuple[str, ...]
    split: Mapping[str, int]
    places: Mapping[int, int]

    @cached_property
    def tasks(self) -> tuple[Task | None, ...]:
        """The cells as tasks, by function and microbatch; None of a function that is none of a task."""
        return tuple(_task(call) for call in self.calls)

    @cached_property
    def cells(self) -> tuple[str, ...]:
        """The cells as the row shows them."""
        return tuple(
            call.cell if task is None else str(task) for call, task in zip(self.calls, self.tasks, strict=True)
        )

    @cached_property
    def makers(self) -> dict[str, int]:
        """By value the place of the task that makes it."""
        return {name: at for at, call in enumerate(self.calls) for name in call.node.output}

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages of which it has tasks."""
        return frozenset(task.stage for task in self.tasks if task is not None)

    def __str__(self) -> str:
        return " ".join(self.cells)


def row_of(model: ModelProto, where: str = "") -> Row | None:
    """The row of a rank file, None of one without tasks; ArtifactError where a call is not sound."""
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


def rows_of_text(text: str) -> tuple[int, dict[str, tuple[str, ...]]]:
    """The number of microbatches and by home (`rank 0`, `ranks 2-3`) the cells, of a text of rows such as `ir/schedule.txt`.

    ArtifactError where it is none.
    """
    count, rows = 0, dict[str, tuple[str, ...]]()
    for line in text.splitlines():
        head, colon, cells = line.partition(":")
        if line.startswith("# Schedule:"):
            words = line.split()
            number = words[-1] if words[-2:-1] == ["Microbatches:"] else ""
            count = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else 0
        elif colon and head.startswith("rank") and not line.startswith("#"):
            rows[head] = tuple(cells.split())
    if count < 1 or not rows:
        raise ArtifactError("it has no number of microbatches, or no rows")
    return count, rows


@dataclass(frozen=True)
class Reads:
    """Which stages read of which: forward along an edge, and whether cotangents come back."""

    forward: frozenset[tuple[int, int]]
    gradients: frozenset[tuple[int, int]]


def stage_reads(rows: list[Row]) -> Reads:
    """What tasks of one stage read of tasks of another, on any rank: values have one name on all of them."""
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
