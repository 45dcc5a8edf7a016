"""The state of lowering to communication: the job's program, the events and groups so far; and collectives of several values.

Reshards write their hops with it (`reshard.py`), as do lookups (`pulls.py`) and the buckets of gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.constants import Constant
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.programs import Comm, Compute, Event, TaskKind, Value
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue, Way
from partc.compiler.ir.value_info import Shape, ValueInfo, whole_bytes
from partc.compiler.ir.values import ValueTable
from partc.compiler.layout import moves as mv
from partc.compiler.layout.layout import Layout, Mesh
from partc.compiler.lower.job import Job, JobOp
from partc.runtime.artifact import format as fmt
from partc.runtime.artifact.ranks import order_text
from partc.runtime.spellings import first_free

Attributes = dict[str, int | str | tuple[int, ...]]
_NAMED = 8
"""The most ranks of a group that its name lists one by one."""


@dataclass(frozen=True)
class Hop:
    """One move of a reshard: the versions before and after it, the value of each, and the cause.

    `derived`: whether it is for a reader whose sharding is derived, not requested.
    """

    before: ShardedValue
    after: ShardedValue
    source: Value
    out: Value
    cause: str
    derived: bool = False

    @property
    def way(self) -> Way:
        """The layouts of the value before and after."""
        return (self.before.group, self.before.layout), (self.after.group, self.after.layout)


@dataclass
class CommLowering:
    """Writes communication into `job`; `events` and `groups` list what was written, and ops that it writes belong to `task`.

    `program` is the argument of `localize`; later facts are in `values`.
    """

    program: Targeted
    job: Job
    values: ValueTable
    events: list[Event] = field(default_factory=list)
    groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    masked: dict[tuple[ShardedValue, ShardedValue], Value] = field(default_factory=dict)
    """Maps a version and its partial layout to the masked value, which one rank of each set keeps (`masked_replicas.py`)."""
    task: TaskKind = TaskKind.FORWARD
    pulls: dict[NodeOnGroup, tuple[tuple[Comm, Group], ...]] = field(default_factory=dict)
    """Maps each node that pulls its rows to the ops of its Pull, each with its ranks."""
    rings: dict[NodeOnGroup, tuple[Value, Value]] = field(default_factory=dict)
    """Maps each ring attention to the maximum and the sum of each query's scores."""
    borders: dict[NodeOnGroup, Comm] = field(default_factory=dict)
    """Maps each Begin, Otherwise and End of a body to its event in the programs."""
    _sets: dict[tuple[Mesh, tuple[int, ...], Group], tuple[tuple[Group, ...], str]] = field(default_factory=dict)
    pieces: int = 1
    """The number of pieces into which the batch of a training with `parts` is dealt."""

    def copy(self, task: TaskKind) -> CommLowering:
        """Returns an independent copy, whose ops belong to `task`."""
        job, values, sets = self.job.copy(), self.values.copy(), dict(self._sets)
        events, groups, masked, pulls = [*self.events], dict(self.groups), dict(self.masked), dict(self.pulls)
        rings, borders = dict(self.rings), dict(self.borders)
        return CommLowering(
            self.program, job, values, events, groups, masked, task, pulls, rings, borders, sets, self.pieces
        )

    def of_task(self, task: TaskKind) -> CommLowering:
        """Returns a writer to the same programs, whose ops belong to `task`."""
        return replace(self, task=task)

    def rename(self, version: ShardedValue, given: Value, out: Value) -> None:
        """Makes `given` available under `out` on a version's ranks."""
        if given is not out:
            self.identity_on(version.group, given, out)
            self.declare(version, out)

    def declare(self, version: ShardedValue, value: Value) -> None:
        """Lists a value of a version's ranks, with its type and local shape."""
        of, shape = self.values.local_value(version), self.values.local_shape(version)
        self.job.declare(version.group, value, of, shape)

    def event(self, op_type: str, hop: Hop, ranks: tuple[Group, ...], group: str, amount: str) -> int:
        """Lists the event of a hop and returns its tag; the shape is that of the value before the hop."""
        tag, shape = len(self.events), self.values.local_shape(hop.before)
        value, way = hop.after.value, hop.way
        event = Event(tag, op_type, value, hop.out, ranks, group, shape, amount, hop.cause, hop.derived, way)
        self.events.append(event)
        return tag

    def fused(
        self,
        move: mv.AllReduce | mv.ReduceScatter | mv.AllGather,
        values: Sequence[ir.Value],
        terms: Sequence[Value],
        results: Sequence[Value],
        elements: int,
        cause: str,
    ) -> None:
        """Writes one collective of several values of one type, as one message; `results` are the results.

        A rank contributes `elements` in all. Values that are scattered or gathered are sharded along axis 0.
        """
        sets, group = self.subgroups(move.after.mesh, move.axes, move.group)
        ranks = len(sets[0])
        item = self.values[values[0]].item_bytes or 1
        attributes: Attributes = {fmt.GROUP: group}
        match move:
            case mv.AllReduce(reduce=reduce):
                op_type, share = fmt.ALL_REDUCE, Fraction(2 * (ranks - 1), ranks)
                attributes[fmt.REDUCE] = reduce
            case mv.ReduceScatter(reduce=reduce):
                op_type, share = fmt.REDUCE_SCATTER, Fraction(ranks - 1, ranks)
                attributes |= {fmt.AXIS: 0, fmt.REDUCE: reduce}
            case _:
                op_type, share = fmt.ALL_GATHER, Fraction(ranks - 1)
                attributes[fmt.AXIS] = 0
        amount = str(math.ceil(share * elements * item))
        shape: Shape | None = (elements,)
        if len(terms) == 1:
            shape = terms[0].shape
        way = (move.group, _before(move)), (move.group, move.after)
        event = Event(len(self.events), op_type, values[0], results[0], sets, group, shape, amount, cause, way=way)
        self.events.append(event)
        step = Comm(op_type, tuple(terms), tuple(results), attributes, event.tag, values[0], cause, amount)
        self.append(move.group, step)

    def append(self, ranks: Group | Ranks, *steps: JobOp) -> None:
        """Appends ops of this task to the programs of the ranks."""
        own = (step if step.task is self.task else replace(step, task=self.task) for step in steps)
        self.job.append(ranks, own)

    def subgroups(self, mesh: Mesh, axes: tuple[int, ...], ranks: Group) -> tuple[tuple[Group, ...], str]:
        """Returns the sets of ranks that differ along these axes only, and their name."""
        key = mesh, axes, ranks
        if key not in self._sets:
            sets = tuple(tuple(ranks[index] for index in one) for one in Layout(mesh, ()).groups(axes))
            self._sets[key] = sets, self.group(sets)
        return self._sets[key]

    def group(self, sets: tuple[tuple[int, ...], ...]) -> str:
        """Returns the name of disjoint sets of ranks, made from their members: `0-1-2-3`, `0-4+3` for four sets like the first.

        For more than eight members the name has a range: `0..28:4+3`.
        """
        first = sets[0]
        name = order_text(first).replace("-", "..") if len(first) > _NAMED else "-".join(map(str, first))
        name += f"+{len(sets) - 1}" if len(sets) > 1 else ""
        name = first_free(name, lambda name: self.groups.get(name, sets) != sets)
        self.groups[name] = sets
        return name

    def amount(self, value: ir.Value, share: Fraction) -> str:
        """Returns this share of a value's bytes, as an expression in the symbols."""
        return _share_text(self.values[value], share)

    def identity_on(self, ranks: Group, given: Value, out: Value) -> None:
        """Writes an Identity on each of the ranks, which makes a value available as another one."""
        if ranks and given is not out:
            self.emit(ranks, "Identity", [given], out)

    def constant(self, ranks: Group, base: Value, word: str, numbers: list[int] | Constant) -> Value:
        """Returns a constant that is named after a value."""
        made = self.job.derived_on(ranks, base, f".{word}")
        return self.job.constant(ranks, made, np.array(numbers, np.int64) if isinstance(numbers, list) else numbers)

    def derived_op(
        self, ranks: Group, op_type: str, inputs: Sequence[Value], base: Value, word: str, **attributes: int
    ) -> Value:
        """Writes a node whose result is not a version of a value, and returns the result, which is named after `base`."""
        return self.emit(ranks, op_type, inputs, self.job.derived_on(ranks, base, f".{word}"), None, **attributes)

    def emit(
        self,
        ranks: Group,
        op_type: str,
        inputs: Sequence[Value | None],
        out: Value,
        source: ir.Node | None = None,
        **attributes: Any,
    ) -> Value:
        """Writes a node with one result, and returns the result."""
        # A value's last version has the name of the node that makes the first, so the node is called otherwise.
        label = Value(f".{op_type.lower()}", out)
        self.append(ranks, computed(op_type, inputs, [out], label, source, **attributes))
        return out


@functools.lru_cache(maxsize=1024)
def _share_text(info: ValueInfo, share: Fraction) -> str:
    """Returns the share of a value's bytes; the text is cached, since values of equal layers are equal."""
    whole = whole_bytes(info)
    if whole is None:
        return "unknown"
    found = mv.share_of(share, whole)
    return str(found) if isinstance(found, int) else str(found.value)


def computed(
    op_type: str,
    inputs: Sequence[Value | None],
    outputs: Sequence[Value],
    label: Value | None = None,
    source: ir.Node | None = None,
    **attributes: Any,
) -> Compute:
    """Returns an ONNX node over values, named after its label or its first result."""
    kinds = ir.convenience.convert_attributes(attributes)
    node = ir.Node("", op_type, [None] * len(inputs), kinds, num_outputs=len(outputs))
    return Compute(node, source or node, tuple(inputs), tuple(outputs), label=label or outputs[0])


def _before(move: mv.AllReduce | mv.ReduceScatter | mv.AllGather) -> Layout:
    """Returns the layout before a collective of several values."""
    mesh, cuts, partial = move.after.mesh, list(move.after.cuts), dict(move.after.partial)
    match move:
        case mv.AllGather(dim=dim, axes=axes):
            cuts[dim] = (*cuts[dim], *axes)
        case mv.ReduceScatter(dim=dim, axes=axes, reduce=reduce):
            cuts[dim] = cuts[dim][: len(cuts[dim]) - len(axes)]
            partial |= dict.fromkeys(axes, reduce)
        case mv.AllReduce(axes=axes, reduce=reduce):
            partial |= dict.fromkeys(axes, reduce)
    return Layout(mesh, tuple(cuts), tuple(sorted(partial.items())))
