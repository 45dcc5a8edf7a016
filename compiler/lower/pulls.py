"""Lookups in a table whose rows are cut over the ranks that ask: Pull in the forward pass, and Push of what a gradient gives to rows.

    Gather `vb,i->ib` on 0-3, v (0, 1), i (0, 1)     every rank    %h = Pull(%table, %ids)
                                                     backward      %ids.own, %rows = Push(%ids, %h.grad)

A list of the group has the ranks that differ along the axes of the rows alone, in the order of their rows: all of them are owners. Along an
axis that cuts rows and not ids, ranks ask the same: all of them get the rows, and the first of them gives their cotangents.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import onnx_ir as ir
import sympy
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Group, Program, Shape, ValueInfo
from partc.compiler.ir.rank_program import CommOp, Event
from partc.compiler.layout.layout import Layout
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.kept import operand_name
from partc.compiler.sharding.operands import input_layout_of, output_layout_of
from partc.runtime.artifact import format as fmt

_IDS = ir.TensorType(ir.DataType.INT64)
_ID_BYTES = 8


def is_pulled(program: Program, instance: NodeOnGroup) -> bool:
    """Whether a node on a group pulls the rows that it looks up."""
    choice = program.choices.get(instance)
    return choice is not None and bool(choice.pulled)


def write_pull(comm: CommLowering, instance: NodeOnGroup) -> None:
    """The Pull of a node, in the programs of its group."""
    one = _Lookup.of(comm, instance)
    made = output_layout_of(comm.program, instance, 0)
    name, table = comm.values.names[made], input_layout_of(comm.program, instance, 0)
    choice = comm.program.choices[instance]
    cause = f"rows that '{comm.program.paths[instance.node]}' looks up ({choice.why.get(choice.pulled, '')})"
    way = (table.group, table.layout), (made.group, made.layout)
    event = one.event(fmt.PULL, made.value, name, cause, way)
    names = tuple(operand_name(comm, instance, k) for k in range(2))
    said = {fmt.GROUP: one.name, **one.said}
    comm.append(instance.group, CommOp(fmt.PULL, names, (name,), said, event.tag, made.value, cause, event.bytes))
    comm.declare(made, name)


def write_push(comm: CommLowering, instance: NodeOnGroup, dy: str, dual: Layout, names: tuple[str, str]) -> None:
    """The Push of the cotangent `dy` of a node's output: ids and rows of the own shard, under these names, on each of its ranks.

    `dual`: the layout of the table's cotangent.
    """
    one = _Lookup.of(comm, instance)
    table, made = input_layout_of(comm.program, instance, 0), output_layout_of(comm.program, instance, 0)
    cause = f"gradient of '{comm.program.paths[instance.node]}'"
    kind = table.value.type
    assert kind is not None
    values = [ir.Value(name=name, type=type) for name, type in zip(names, (_IDS, kind), strict=True)]
    item = comm.values[table.value].item_bytes
    for value, type, size in zip(
        values, ("tensor(int64)", comm.values[table.value].type), (_ID_BYTES, item), strict=True
    ):
        comm.values.add(value, ValueInfo(type, None, size))
    way = (made.group, Layout(made.layout.mesh, made.layout.cuts)), (table.group, Layout(dual.mesh, dual.cuts))
    event = one.event(fmt.PUSH, values[1], names[1], cause, way)
    ids = operand_name(comm, instance, 1)
    said = {fmt.GROUP: one.name, **one.said}
    for ranks, given in ((one.givers, (ids, dy)), (one.others, ())):
        if ranks:
            comm.append(ranks, CommOp(fmt.PUSH, given, names, said, event.tag, values[1], cause, event.bytes))
    for name, value in zip(names, values, strict=True):
        comm.builders.declare(instance.group, name, value, None)


def write_dense(comm: CommLowering, instance: NodeOnGroup, names: tuple[str, str], dx: str) -> None:
    """Zeros of the own shard of the table, to which rows are added."""
    group, kind = instance.group, input_layout_of(comm.program, instance, 0).value.dtype
    shape = comm.values.local_shape(input_layout_of(comm.program, instance, 0))
    assert kind is not None
    sizes = comm.constant(group, dx, "shape", [int(dim) for dim in shape or ()])
    zero = ir.tensor([0.0], dtype=kind)
    zeros = comm.emit(group, "ConstantOfShape", [sizes], comm.builders.free(group, f"{dx}.zeros"), None, value=zero)
    last = comm.constant(group, dx, "axes", [1])
    places = comm.beside(group, "Unsqueeze", [names[0], last], f"{dx}.places")
    comm.emit(group, "ScatterND", [zeros, places, names[1]], dx, None, reduction="add")


@dataclass(frozen=True)
class _Lookup:
    """A lookup: the sets of ranks that differ in their rows, and what its nodes say; `givers` have ids that no other rank gives."""

    comm: CommLowering
    sets: tuple[Group, ...]
    name: str
    said: dict[str, int | str | tuple[int, ...]]
    ids: Shape | None
    row_bytes: int
    givers: Group
    others: Group

    @staticmethod
    def of(comm: CommLowering, instance: NodeOnGroup) -> _Lookup:
        choice = comm.program.choices[instance]
        table = input_layout_of(comm.program, instance, 0)
        axes = choice.axes[choice.pulled]
        sets, name = comm.subgroups(choice.mesh, axes, instance.group)
        shape = comm.values.local_shape(table)
        rows = comm.values[table.value].shape
        assert shape is not None
        assert rows is not None
        row = tuple(int(dim) for dim in shape[1:])
        said: dict[str, int | str | tuple[int, ...]] = {
            fmt.OWNERS: tuple(range(len(sets[0]))),
            fmt.ROWS: int(rows[0]),
            fmt.ROW: row,
        }
        item = comm.values[table.value].item_bytes or 1
        givers = _givers(choice, instance.group)
        others = tuple(rank for rank in instance.group if rank not in givers)
        ids = comm.values.local_shape(input_layout_of(comm.program, instance, 1))
        return _Lookup(comm, sets, name, said, ids, int(sympy.prod(row)) * item, givers, others)

    def event(self, op_type: str, value: ir.Value, name: str, cause: str, way: object) -> Event:
        """Lists the event of a Pull or a Push."""
        tag, amount = len(self.comm.events), self._bytes()
        event = Event(tag, op_type, value, name, self.sets, self.name, self.ids, amount, cause, way=way)  # type: ignore[arg-type]
        self.comm.events.append(event)
        return event

    def _bytes(self) -> str:
        """What a rank receives where ids are even over the owners: of at most min(n, rows) distinct ids, (P-1)/P."""
        counts = [read(str(dim)) for dim in self.ids or ()]
        if self.ids is None or any(one is None for one in counts):
            return "unknown"
        owners, rows = len(self.sets[0]), self.said[fmt.ROWS]
        distinct = sympy.Min(sympy.Mul(1, *counts), rows)
        share = sympy.Rational(Fraction(owners - 1, owners)) * (_ID_BYTES + self.row_bytes)
        found = as_dim(normal(sympy.Mul(share, distinct), {}))
        return str(found) if isinstance(found, int) else str(found.value)


def _givers(choice: NodeSharding, group: Group) -> Group:
    """The ranks that are first along the axes that cut rows and not ids."""
    ids = {axis for letter, axes in choice.axes.items() if letter != choice.pulled for axis in axes}
    alike = tuple(axis for axis in choice.axes[choice.pulled] if axis not in ids)
    layout = Layout(choice.mesh, (alike,))
    return tuple(rank for index, rank in enumerate(group) if layout.shard(index) == (0,))
