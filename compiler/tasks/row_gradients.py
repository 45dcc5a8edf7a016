"""Gradients by rows, from look-ups to the update: terms of several look-ups follow each other, and ranks gather those of all.

Where the dense gradient would be a sum over ranks, each rank has some of the rows, so a list of rows is cut along its first dim by the same
axes, and an AllGather takes the place of the AllReduce:

    table.grad          [100000, 16], a term on each of dp=2      AllReduce: 6.4 MB
    table.grad.rows     [32, 16], 16 on each of dp=2              AllGather: 1 KB, and 128 bytes for the ids

The order is that of the ranks and of the look-ups, so sums of rows that stand several times are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import sympy
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.autodiff.engine import RowGradient
from partc.compiler.dims.normal import normal as normal_expression
from partc.compiler.dims.reading import read
from partc.compiler.ir.program import Dim, Group, Shape, ShardedValue, ValueInfo
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.lower.comm import CommLowering
from partc.compiler.tasks.cotangent_names import PARTIAL
from partc.compiler.tasks.local_view import Gradient

_INT64 = ir.TensorType(ir.DataType.INT64)


@dataclass(frozen=True)
class RowTerm:
    """What one look-up gives: `version` is the table's, `partial` along the axes over which the dense gradient would be summed."""

    version: ShardedValue
    names: RowGradient


@dataclass(frozen=True)
class _Rows:
    """Ids and rows as they lie on a group, and their names there."""

    ids: ShardedValue
    rows: ShardedValue
    names: RowGradient


def named_rows(name: str) -> RowGradient:
    """The names of the ids and the rows that stand for a cotangent of this name."""
    end = PARTIAL if name.endswith(PARTIAL) else ""
    base = name.removesuffix(PARTIAL)
    return RowGradient(f"{base}.ids{end}", f"{base}.rows{end}")


class RowReduction:
    """Brings the rows of a table's gradient to where the table is updated, by `comm`, which writes ops of the update.

    `terms` writes ops of the backward pass. A batch in several `parts` has the rows of all, one after the other.
    `low`: rows travel in bfloat16.
    """

    def __init__(self, terms: CommLowering, comm: CommLowering, parts: int, *, low: bool = False) -> None:
        self.terms, self.comm, self.parts, self.low = terms, comm, parts, low
        self.builders, self.values, self.names = comm.builders, comm.values, comm.values.names

    def reduce(self, value: ir.Value, terms: Sequence[RowTerm], defs: Sequence[ShardedValue]) -> list[Gradient]:
        """The gradient of a parameter on each of its definitions."""
        main, wanted = defs[0], f"{self.names[defs[0]]}.grad"
        alike: dict[ShardedValue, list[RowGradient]] = {}
        for term in terms:
            alike.setdefault(term.version, []).append(term.names)
        only = len(alike) == 1
        brought = []
        for version, names in alike.items():
            final = only and version == main and self.parts == 1
            own = self._appended(self.terms, version.group, names, wanted, final)
            given = self._listed(version, self._of_all_parts(version.group, own))
            brought.append(self._brought(given, main, wanted, only=only))
        whole = brought[0]
        if not only:
            whole = self._listed(
                main, self._appended(self.comm, main.group, [one.names for one in brought], wanted, True)
            )
        found = [whole, *(self._brought(whole, home, f"{self.names[home]}.grad") for home in defs[1:])]
        return [
            Gradient(value, home, one.names.rows, home, one.names.ids) for home, one in zip(defs, found, strict=True)
        ]

    def made_dense(self, one: Gradient, cotangent: ir.Value) -> Gradient:
        """The gradient as large as the table: zeros, to which the rows are added."""
        group, version = one.home.group, ShardedValue(cotangent, one.home.group, one.home.layout)
        shape = self.values.local_shape(version)
        assert shape is not None
        assert cotangent.dtype is not None
        name = self.builders.free(group, one.name.removesuffix(".rows"))
        sizes = self.comm.constant(group, name, "shape", [int(dim) for dim in shape])
        axis = self.comm.constant(group, name, "axis", [1])
        places = self.comm.beside(group, "Unsqueeze", [one.ids, axis], f"{name}.places")
        zero = ir.tensor(np.zeros(1, cotangent.dtype.numpy()))
        zeros = self.builders.free(group, f"{name}.zeros")
        self.comm.emit(group, "ConstantOfShape", [sizes], zeros, None, value=zero)
        self.comm.emit(group, "ScatterND", [zeros, places, one.name], name, None, reduction="add")
        self.comm.declare(version, name)
        return Gradient(one.parameter, one.home, name, one.share)

    def _of_all_parts(self, group: Group, one: RowGradient) -> RowGradient:
        """The rows of all parts of a batch: an op with that of one part as its operand, which stands for those of all."""
        if self.parts == 1:
            return one
        made: list[str] = []
        for name in (one.ids, one.rows):
            value, shape = self.builders.of(group)[0].types[name]
            kind, whole = value.type, None if shape is None else (_times(shape[0], self.parts), *shape[1:])
            assert kind is not None
            made.append(self.builders.free(group, f"{name.removesuffix(PARTIAL)}.parts"))
            self.comm.emit(group, "Concat", [name], made[-1], None, axis=0)
            self.builders.declare(group, made[-1], self._value(made[-1], kind, whole), whole)
            for builder in self.builders.of(group):
                builder.appended.add(made[-1])
        return RowGradient(*made)

    def _listed(self, version: ShardedValue, names: RowGradient) -> _Rows:
        """What a group has under these names, as values: terms of a sum are parts of the list."""
        table, layout = version.value, version.layout
        first = (*layout.cuts[0], *(axis for axis, _ in layout.partial))
        ids, rows = normal(Layout(layout.mesh, (first,))), normal(Layout(layout.mesh, (first, *layout.cuts[1:])))
        shape = self.builders.of(version.group)[0].types[names.ids][1]
        count = _times(shape[0], ids.num_shards(0)) if shape else None
        width = self.values[table].shape
        assert table.type is not None
        assert width is not None
        made = (
            self._value(names.ids, _INT64, None if count is None else (count,)),
            self._value(names.rows, table.type, None if count is None else (count, *width[1:])),
        )
        return _Rows(ShardedValue(made[0], version.group, ids), ShardedValue(made[1], version.group, rows), names)

    def _value(self, name: str, kind: ir.TypeProtocol, shape: Shape | None) -> ir.Value:
        value = ir.Value(name=name.removesuffix(PARTIAL), type=kind, shape=None if shape is None else ir.Shape(shape))
        assert value.dtype is not None
        return self.values.add(value, ValueInfo(type_text(kind), shape, value.dtype.bitwidth // 8))

    def _appended(
        self, comm: CommLowering, group: Group, parts: Sequence[RowGradient], wanted: str, final: bool
    ) -> RowGradient:
        """Lists of rows, one after the other, as one."""
        if len(parts) == 1:
            return parts[0]
        names = named_rows(wanted if final else wanted + PARTIAL)
        made = RowGradient(*(self.builders.free(group, name) for name in (names.ids, names.rows)))
        for name, given in ((made.ids, [one.ids for one in parts]), (made.rows, [one.rows for one in parts])):
            comm.emit(group, "Concat", given, name, None, axis=0)
            shapes = [self.builders.of(group)[0].types[one] for one in given]
            shape, kind = _joined([one for _, one in shapes]), shapes[0][0].type
            assert kind is not None
            self.builders.declare(group, name, self._value(name, kind, shape), shape)
        return made

    def _brought(self, given: _Rows, home: ShardedValue, wanted: str, *, only: bool = True) -> _Rows:
        """Brings rows to where a version of the table lies."""
        group, layout = home.group, home.layout
        ids = ShardedValue(given.ids.value, group, normal(Layout(layout.mesh, layout.cuts[:1])))
        rows = ShardedValue(given.rows.value, group, layout)
        names = named_rows(wanted)
        if not only:
            names = RowGradient(*(f"{name.removesuffix(PARTIAL)}.all" for name in (given.names.ids, given.names.rows)))
        cause = f"gradient of '{home.value.name}'"
        made = []
        for source, target, name, out in (
            (given.ids, ids, given.names.ids, names.ids),
            (given.rows, rows, given.names.rows, names.rows),
        ):
            if source == target:
                made.append(name)
                continue
            ranks = tuple(dict.fromkeys((*source.group, *target.group)))
            if self.low and source.value.dtype == ir.DataType.FLOAT:
                made.append(self._sent_low(source, name, target, out, cause))
            else:
                made.append(self.comm.reshard(source, name, target, self.builders.free(ranks, out), cause))
        return _Rows(ids, rows, RowGradient(*made))

    def _sent_low(self, source: ShardedValue, name: str, target: ShardedValue, out: str, cause: str) -> str:
        """Brings rows in bfloat16; their name in their own type."""
        kind = ir.TensorType(ir.DataType.BFLOAT16)
        value = self._value(f"{out}.bfloat16", kind, self.values[source.value].shape)
        one, other = (ShardedValue(value, version.group, version.layout) for version in (source, target))
        ranks = tuple(dict.fromkeys((*source.group, *target.group)))
        given = self.builders.free(ranks, f"{name}.bfloat16")
        self.comm.emit(source.group, "Cast", [name], given, None, to=int(ir.DataType.BFLOAT16))
        self.comm.declare(one, given)
        there = self.comm.reshard(one, given, other, self.builders.free(ranks, f"{out}.bfloat16"), cause)
        made = self.builders.free(target.group, out)
        self.comm.emit(target.group, "Cast", [there], made, None, to=int(ir.DataType.FLOAT))
        self.comm.declare(target, made)
        return made


def _times(dim: Dim, shards: int) -> Dim:
    if isinstance(dim, int) or shards == 1:
        return dim * shards if isinstance(dim, int) else dim
    expression = read(dim)
    return f"{shards}*({dim})" if expression is None else _text(expression * shards)


def _joined(shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape of values one after the other."""
    known = [one for one in shapes if one is not None]
    counts = [read(str(one[0])) for one in known]
    if len(known) < len(shapes) or any(one is None for one in counts):
        return None
    return (_text(sympy.Add(*counts)), *known[0][1:])


def _text(expression: sympy.Expr) -> Dim:
    found = normal_expression(expression, {})
    return int(found) if found.is_Integer else str(found)
