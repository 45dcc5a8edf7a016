"""Groups the updates of a rank as its run list says: nodes of one function run as one over memory with contiguous operands.

    Momentum(a, a.grad, a.momentum), Momentum(b, b.grad, b.momentum)  ->  Momentum([a b], [a.grad b.grad], [a.momentum b.momentum])

The functions are element-wise, so the result is the same whether they run on one tensor or on several contiguous ones. The compiler decides
which nodes are grouped and which memory they need (`compiler/emit/run_list.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from partc.runtime.artifact.graph.row_function import is_rowwise
from partc.runtime.artifact.training.scalars import NUMBERS

from ..artifact.format import Shape
from ..errors import ArtifactError
from ..program.flat_buffers import FlatBuffer, fixed_shape
from ..program.rank_file import RankFile
from ..program.steps import Update

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto

_STATE = "state"
_AGAIN = "  help: the file was changed; compile again"


@dataclass(frozen=True)
class FusedUpdate:
    """Nodes that run as one node.

    `operands` and `outputs` list, for each operand and output of the function, the names of all members in order; a scalar that all members
    share has only one name.
    """

    node: NodeProto
    function: FunctionProto
    operands: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    shared: tuple[bool, ...]
    """Whether each operand is a scalar that all members share."""
    elements: int
    target: str = ""


@dataclass(frozen=True)
class RowUpdate:
    """A node that updates the looked-up rows of a table and its slots; it runs alone, in the own memory of the table and the slots."""

    node: NodeProto
    function: FunctionProto
    target: str = ""


@dataclass
class UpdatePlan:
    """All groups of updates by the index of their step, and the contiguous buffers: those of a step, and those of the state (`state`)."""

    groups: dict[int, list[FusedUpdate | RowUpdate]] = field(default_factory=dict)
    buffers: list[FlatBuffer] = field(default_factory=list)
    state: list[FlatBuffer] = field(default_factory=list)
    renewed: dict[str, str] = field(default_factory=dict)
    """Maps each shard that each step slices from a parameter to its new value."""
    in_place: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Maps each step to pairs of buffers: that of such a shard, and that of its new value, which may be the same."""


def planned_updates(
    file: RankFile, shapes: Mapping[str, Shape], types: Mapping[str, str], coalesced: Sequence[FlatBuffer]
) -> UpdatePlan:
    """Plans the updates of a rank and their memory; `coalesced` are the existing buffers for collectives of several values.

    ArtifactError where a group would run over memory in which its operands are not contiguous.
    """
    plan = UpdatePlan()
    sizes = {name: prod(fixed) for name, shape in shapes.items() if (fixed := fixed_shape(shape)) is not None}
    types = {**types, **{record.value: record.type for record in file.state}}
    for record in file.state:
        sizes |= dict.fromkeys(filter(None, (record.value, record.next)), prod(record.local_shape(file.rank)))
    following = {record.next: record.value for record in file.state if record.next}
    places: dict[str, tuple[str, int]] = {}
    for buffer in coalesced:
        places |= {name: (buffer.name, at) for name, at in buffer.places.items()}
    for row in file.buffers:
        members = tuple(row.members)
        wrong = not places.keys().isdisjoint(members) or len({*members}) < len(members)
        if wrong or not sizes.keys() >= {*members} or len({types.get(name) for name in members}) > 1:
            raise ArtifactError(f"{file.where}: the run list: '{members[0]}' and on are not of one buffer\n{_AGAIN}")
        buffer = FlatBuffer(f"{members[0]} and on", types[members[0]], members, tuple(sizes[name] for name in members))
        (plan.state if row.kind == _STATE else plan.buffers).append(buffer)
        places |= {name: (buffer.name, at) for name, at in buffer.places.items()}
    functions = {function.name: function for function in file.model.functions}
    for index, step in enumerate(file.steps):
        if not isinstance(step, Update):
            continue
        plan.groups[index] = [_group(nodes, functions[nodes[0].op_type], step.target, sizes) for nodes in step.groups]
        plan.renewed.update(step.renewed)
        pairs = [tuple(places.get(name, (name, 0))[0] for name in pair) for pair in step.renewed]
        plan.in_place[index] = [(old, new) for old, new in dict.fromkeys(pairs)]
        for group in plan.groups[index]:
            if isinstance(group, FusedUpdate):
                for names in (*group.operands, *group.outputs):
                    own = [following.get(name, name) for name in names]
                    if len(own) > 1 and not _follow(own, places, sizes):
                        fact = f"'{own[0]}' and on do not follow each other in memory, and an update takes them for one"
                        raise ArtifactError(f"{file.where}: the run list: {fact}\n{_AGAIN}")
    return plan


def _group(
    nodes: Sequence[NodeProto], function: FunctionProto, target: str, sizes: Mapping[str, int]
) -> FusedUpdate | RowUpdate:
    if is_rowwise(function):
        return RowUpdate(nodes[0], function, target)
    shared = tuple(formal in NUMBERS for formal in function.input)
    operands = tuple(
        names[:1] if one else names
        for one, names in zip(shared, zip(*(node.input for node in nodes), strict=True), strict=True)
    )
    results = tuple(zip(*(node.output for node in nodes), strict=True))
    first = operands[shared.index(False)]
    return FusedUpdate(nodes[0], function, operands, results, shared, sum(sizes[name] for name in first), target)


def _follow(names: Sequence[str], places: Mapping[str, tuple[str, int]], sizes: Mapping[str, int]) -> bool:
    """Whether values are contiguous, in this order, in one buffer."""
    if not places.keys() >= {*names}:
        return False
    buffer, at = places[names[0]]
    for name in names:
        if places[name] != (buffer, at):
            return False
        at += sizes[name]
    return True
