"""Lookups in a table whose rows are sharded over ranks: Pull in the forward pass, and Push of the rows' gradients.

    Gather `vb,i->ib` on 0-3, v (0, 1), i (0, 1)     every rank    %h, %asked, %counts, %places = Pull(%table, %ids)
                                                     backward      %ids.own, %rows = Push(%asked, %counts, %places, %h.grad)
    Gather on 0-3, its rows served by 4-5            0-3           %h, , %counts, %places = Pull(, %ids)
                                                     4-5           , %asked, %counts, = Pull(%table, )
                                                     backward      0-3   Push(, %counts, %places, %h.grad)
                                                                   4-5   %ids.own, %rows = Push(%asked, %counts, , )

Push sends only rows: the owners know the ids from the Pull. Without a gradient a Pull has only the rows as its result.

A set of the process group has the ranks that differ only along the axes of the rows, in the order of their rows: all of them are owners.
For a served table the set has the servers, which are the owners, followed by all ranks that ask. Ranks along an axis that does not shard
ids ask for the same rows: all of them get the rows, and the first of them sends the cotangents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import onnx_ir as ir
import sympy
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read, smallest
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import BY_EXPERT, SERVED
from partc.compiler.ir.program import Sharded
from partc.compiler.ir.programs import Comm, Event, Operands, Value
from partc.compiler.ir.sharded import Group, ShardedValue, Way, ranks_of
from partc.compiler.ir.value_info import Shape, ValueInfo
from partc.compiler.layout.layout import Layout
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.masked_replicas import operand
from partc.compiler.sharding.values.operands import input_layout_of, output_layout_of
from partc.runtime.artifact import format as fmt

_IDS = ir.TensorType(ir.DataType.INT64)
_ID_BYTES = 8


def is_pulled(program: Sharded, instance: NodeOnGroup) -> bool:
    """Whether a node on a group pulls the rows that it looks up."""
    choice = program.choices.get(instance)
    if BY_EXPERT in instance.node.meta and choice is not None and not choice.rule.dealt:
        return False  # its rows are where its tables are
    return SERVED in instance.node.meta or (choice is not None and bool(choice.pulled))


def write_pull(comm: CommLowering, instance: NodeOnGroup) -> None:
    """Writes the Pull of a node, on the ranks that own the rows and on those that ask for them."""
    lookup = _Lookup.of(comm, instance)
    output, choice = lookup.output, comm.program.choices.get(instance)
    why = f"served by ranks {', '.join(map(str, instance.node.meta.get(SERVED, ())))}"
    if choice is not None and choice.pulled:
        why = choice.why.get(choice.pulled, "")
    cause = f"rows that '{comm.program.paths[instance.node]}' looks up ({why})"
    rows, table, ids = comm.values.at[output], operand(comm, instance, 0), operand(comm, instance, 1)
    event = lookup.event(
        fmt.PULL, output.value, rows, cause, (lookup.location_of(lookup.table), lookup.location_of(output))
    )
    ops: list[tuple[Comm, Group]] = []
    for ranks, given in lookup.parts(output.group):
        inputs = (table if given[0] else None, ids if given[1] else None)
        outputs = (rows,) if given[1] else ()
        ops.append((lookup.op(fmt.PULL, inputs, outputs, event), ranks))
        comm.append(ranks, ops[-1][0])
    comm.pulls[instance] = tuple(ops)
    comm.declare(output, rows)


def write_push(
    comm: CommLowering, instance: NodeOnGroup, dy: Value, dual: Layout, results: tuple[Value, Value]
) -> None:
    """Writes the Push of the cotangent `dy` of a node's output; its results `results` are the ids and rows of each owner's shard.

    `dual`: the layout of the table's cotangent.
    """
    there = _Lookup.of(comm, instance)
    asked, lookup = _with_asked(there, comm.pulls[instance]), there.back()
    cause = f"gradient of '{comm.program.paths[instance.node]}'"
    kind, info = lookup.table.value.type, comm.values[lookup.table.value]
    assert kind is not None
    values = [ir.Value(name=str(one), type=type) for one, type in zip(results, (_IDS, kind), strict=True)]
    comm.values.add(values[0], ValueInfo("tensor(int64)", None, _ID_BYTES))
    comm.values.add(values[1], ValueInfo(info.type, None, info.item_bytes))
    owned = ShardedValue(lookup.table.value, lookup.table.group, Layout(dual.mesh, dual.cuts))
    event = lookup.event(
        fmt.PUSH, values[1], results[1], cause, (lookup.location_of(lookup.output), lookup.location_of(owned))
    )
    for ranks, given in lookup.parts(lookup.givers):
        inputs, outputs = (*asked.on(given), dy if given[1] else None), results if given[0] else ()
        comm.append(ranks, lookup.op(fmt.PUSH, inputs, outputs, event, gives=True))
    for rows, value in zip(results, values, strict=True):
        comm.job.declare(lookup.table.group, rows, value, None)


def _with_asked(pull: _Lookup, pulls: Iterable[tuple[Comm, Group]]) -> _PullRecord:
    """Adds to a Pull the results that its Push reads."""
    comm, made = pull.comm, pull.comm.values.at[pull.output]
    parts = pull.parts(pull.givers)
    ranks = tuple(rank for some, _ in parts for rank in some)
    asked = _PullRecord(*(comm.job.derived_on(ranks, made, f".{word}") for word in ("asked", "counts", "places")))
    for requested, shape in (
        (asked.ids, None),
        (asked.counts, (pull.owners + len(pull.places),)),
        (asked.places, pull.ids()),
    ):
        value = ir.Value(name=str(requested), type=_IDS, shape=None if shape is None else ir.Shape(shape))
        comm.values.add(value, ValueInfo("tensor(int64)", shape, _ID_BYTES))
        there = tuple(rank for some, key in parts if requested in asked.on(key) for rank in some)
        comm.job.declare(there, requested, value, shape)
    for old, ranks in pulls:
        for some, key in parts:
            outputs = (*(old.outputs or (None,)), *asked.on(key))
            while outputs and outputs[-1] is None:
                outputs = outputs[:-1]
            new = replace(old, outputs=outputs, attributes={**old.attributes, fmt.GIVERS: pull.places})
            both = ranks_of(ranks) & ranks_of(some)
            comm.job.replace(both, old, [(new, both)])
    return asked


def write_dense(comm: CommLowering, instance: NodeOnGroup, ids_and_rows: tuple[Value, Value], dx: Value) -> None:
    """Writes zeros of the rank's shard of the table, to which the rows are added."""
    table = input_layout_of(comm.program, instance, 0)
    group, kind, shape = table.group, table.value.dtype, comm.values.local_shape(table)
    assert kind is not None
    sizes = comm.constant(group, dx, "shape", [int(dim) for dim in shape or ()])
    zero = ir.tensor([0.0], dtype=kind)
    zeros = comm.emit(group, "ConstantOfShape", [sizes], comm.job.derived_on(group, dx, ".zeros"), value=zero)
    last = comm.constant(group, dx, "axes", [1])
    places = comm.derived_op(group, "Unsqueeze", [ids_and_rows[0], last], dx, "places")
    comm.emit(group, "ScatterND", [zeros, places, ids_and_rows[1]], dx, reduction="add")


@dataclass(frozen=True)
class _PullRecord:
    """The values by which a Push knows the Pull's requests: the ids asked of an owner, the counts of both ends, the ids' places."""

    ids: Value
    counts: Value
    places: Value

    def on(self, given: tuple[bool, bool]) -> Operands:
        """Returns the operands that a rank has; `given`: whether it owns rows, and whether it sends their gradients."""
        owns, gives = given
        return self.ids if owns else None, self.counts if owns or gives else None, self.places if gives else None


@dataclass(frozen=True)
class _Lookup:
    """A lookup: the participating sets of ranks, the number of owners in each, and the layouts of the table and of the result.

    `givers`: the first of the ranks that ask for the same rows.
    """

    comm: CommLowering
    table: ShardedValue
    output: ShardedValue
    sets: tuple[Group, ...]
    group: str
    owners: int
    givers: Group

    @staticmethod
    def of(comm: CommLowering, instance: NodeOnGroup) -> _Lookup:
        """The lookup of a node on a group."""
        table, home = input_layout_of(comm.program, instance, 0), output_layout_of(comm.program, instance, 0)
        output = ShardedValue(home.value, home.group, Layout(home.layout.mesh, home.layout.cuts))
        ids = input_layout_of(comm.program, instance, 1)
        if SERVED in instance.node.meta:
            sets: tuple[Group, ...] = (tuple(dict.fromkeys((*table.group, *instance.group))),)
            axes: tuple[int, ...] = tuple(range(len(ids.layout.mesh)))
            group, owners, layout = comm.group(sets), len(table.group), ids.layout
        else:
            choice = comm.program.choices[instance]
            axes = choice.axes[choice.pulled]
            sets, group = comm.subgroups(choice.mesh, axes, instance.group)
            owned = choice.input(1)
            assert owned is not None
            owners, layout = len(sets[0]), owned
        alike = tuple(axis for axis in axes if not any(axis in cut for cut in layout.cuts))
        first = Layout(layout.mesh, (alike,))
        givers = tuple(rank for index, rank in enumerate(instance.group) if first.shard(index) == (0,))
        return _Lookup(comm, table, output, sets, group, owners, givers)

    def back(self) -> _Lookup:
        """Returns the lookup for the way back, in which servers and givers take part."""
        (first, *others) = self.sets
        owners = first[: self.owners]
        if others or {*owners} >= {*first}:
            return self
        sets = (tuple(dict.fromkeys((*owners, *self.givers))),)
        return replace(self, sets=sets, group=self.comm.group(sets))

    def parts(self, asking: Group) -> list[tuple[Group, tuple[bool, bool]]]:
        """Returns the participating ranks, grouped by (owns rows, asks for rows)."""
        found: dict[tuple[bool, bool], list[int]] = {}
        owning = {rank for ranks in self.sets for rank in ranks[: self.owners]}
        for rank in dict.fromkeys(rank for ranks in self.sets for rank in ranks):
            found.setdefault((rank in owning, rank in asking), []).append(rank)
        return [(tuple(ranks), key) for key, ranks in found.items()]

    @property
    def places(self) -> tuple[int, ...]:
        """The places of givers in a set, which are the same in every set."""
        return tuple(place for place, rank in enumerate(self.sets[0]) if rank in self.givers)

    def location_of(self, version: ShardedValue) -> tuple[Group, Layout]:
        """Returns a version in the form in which events list it."""
        return version.group, version.layout

    def op(self, op_type: str, inputs: Operands, outputs: Operands, event: Event, *, gives: bool = False) -> Comm:
        """Returns the node of some ranks; `gives`: whether rows are sent back."""
        rows = self.comm.values[self.table.value].shape
        assert rows is not None
        said: dict[str, int | str | tuple[int, ...]] = {
            fmt.GROUP: self.group,
            fmt.OWNERS: tuple(range(self.owners)),
            fmt.ROWS: int(rows[0]),
            fmt.ROW: self._row(),
            **({fmt.GIVERS: self.places} if gives else {}),
        }
        return Comm(op_type, inputs, outputs, said, event.tag, event.value, event.cause, event.bytes)

    def event(self, op_type: str, value: ir.Value, made: Value, cause: str, way: Way) -> Event:
        """Lists the event of a Pull or a Push."""
        tag, amount, shape = len(self.comm.events), self._bytes(_ID_BYTES * (op_type == fmt.PULL)), self.ids()
        event = Event(tag, op_type, value, made, self.sets, self.group, shape, amount, cause, way=way)
        self.comm.events.append(event)
        return event

    def _row(self) -> tuple[int, ...]:
        shape = self.comm.values.local_shape(self.table)
        assert shape is not None
        return tuple(int(dim) for dim in shape[1:])

    def ids(self) -> Shape | None:
        """Returns the shape of a rank's ids: the shape of its result without a row's own dims."""
        shape = self.comm.values.local_shape(self.output)
        return None if shape is None else shape[: len(shape) - len(self._row())]

    def _bytes(self, of_id: int) -> str:
        """Returns the bytes that a rank receives in a Pull, and an owner in a Push, if ids are even over the owners; `of_id`: bytes of an
        id.

        Among at most min(n, rows) distinct ids, those of the other ranks count: (P-1)/P of them if the P owners also ask.
        """
        ids, table = self.ids(), self.comm.values[self.table.value]
        counts = [read(str(dim)) for dim in ids or ()]
        if ids is None or table.shape is None or any(one is None for one in counts):
            return "unknown"
        distinct = smallest(sympy.Mul(1, *counts), int(table.shape[0]))
        apart = not {*self.sets[0][: self.owners]} & {*self.output.group}
        share = Fraction(1) if apart else Fraction(self.owners - 1, self.owners)
        each = of_id * (not apart) + math.prod(self._row()) * (table.item_bytes or 1)
        found = as_dim(normal(sympy.Mul(sympy.Rational(share) * each, distinct), {}))
        return str(found) if isinstance(found, int) else str(found.value)
