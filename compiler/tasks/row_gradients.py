"""Gradients by rows, from look-ups to the update: the rows of several look-ups are concatenated, and ranks gather the rows of all ranks.

Where the dense gradient would be a sum over ranks, each rank has some of the rows, so a list of rows is cut along its first dim by the same
axes, and an AllGather takes the place of the AllReduce:

    table.grad          [100000, 16], a term on each of dp=2      AllReduce: 6.4 MB
    table.grad.rows     [32, 16], 16 on each of dp=2              AllGather: 1 KB, and 128 bytes for the ids

Tables of which equally many rows are looked up share two messages: ids as columns of one value, and rows side by side.

The order is that of the ranks and of the look-ups, so sums of rows that stand several times are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import sympy
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.autodiff.engine import RowGradient
from partc.compiler.dims.normal import normal as normal_expression
from partc.compiler.dims.reading import read
from partc.compiler.ir.programs import Value
from partc.compiler.ir.sharded import Group, ShardedValue, ranks_of
from partc.compiler.ir.value_info import Dim, Shape, ValueInfo
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.layout.moves import AllGather
from partc.compiler.layout.reshard import lower
from partc.compiler.lower.comm import CommLowering, computed
from partc.compiler.lower.local_view import Gradient
from partc.compiler.lower.reshard import reshard
from partc.compiler.tasks.duals import PARTIAL

_INT64 = ir.TensorType(ir.DataType.INT64)


@dataclass(frozen=True)
class Rows:
    """A table's gradient as rows: `rows[i]` is added to the row `ids[i]`."""

    ids: Value
    rows: Value


@dataclass(frozen=True)
class RowTerm:
    """The gradient of one lookup: `version` is the table's, `partial` along the axes over which the dense gradient would be summed."""

    version: ShardedValue
    given: Rows


@dataclass(frozen=True)
class _PlacedRows:
    """Ids and rows as they lie on a group, and what they are there."""

    ids: ShardedValue
    rows: ShardedValue
    records: Rows


@dataclass(frozen=True)
class _Begun:
    """A gradient on its way: its lists as their ranks have them, the parameter's definitions, and the name that is wanted."""

    value: ir.Value
    lists: Sequence[_PlacedRows]
    defs: Sequence[ShardedValue]
    result: str
    then: Callable[[list[Gradient]], None]


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
        self.job, self.values, self.at = comm.job, comm.values, comm.values.at
        self._waiting: dict[Hashable, list[_Begun]] = {}

    def begin(
        self,
        value: ir.Value,
        terms: Sequence[RowTerm],
        defs: Sequence[ShardedValue],
        then: Callable[[list[Gradient]], None],
    ) -> None:
        """Takes the gradient of a parameter; `then` is told what it is on each of its definitions, at the latest by `flush`."""
        main, wanted = defs[0], f"{self.at[defs[0]]}.grad"
        alike: dict[ShardedValue, list[Rows]] = {}
        for term in terms:
            alike.setdefault(term.version, []).append(term.given)
        lists = []
        for version, parts in alike.items():
            final = len(alike) == 1 and version == main and self.parts == 1
            own = self._appended(self.terms, version.group, parts, wanted, final)
            lists.append(self._listed(version, self._of_all_parts(version.group, own)))
        one = _Begun(value, lists, defs, wanted, then)
        key = self._joinable(one)
        if key is None:
            self._finish(one, self._gathered(one))
        else:
            self._waiting.setdefault(key, []).append(one)

    def flush(self) -> Callable[[], None]:
        """Gathers what waits for others: those of one count of rows as one message for the ids, and one for the rows.

        What comes back takes them apart again: it is called when all else is on its way.
        """
        waiting, self._waiting = self._waiting, {}
        apart = [(some, self._gathered_together(some)) for some in waiting.values()]

        def finish() -> None:
            for some, found in apart:
                for one, rows in zip(some, found(), strict=True):
                    self._finish(one, rows)

        return finish

    def _gathered_together(self, some: Sequence[_Begun]) -> Callable[[], list[_PlacedRows]]:
        if len(some) > 1:
            return self._joined(some)
        rows = self._gathered(some[0])
        return lambda: [rows]

    def _finish(self, one: _Begun, whole: _PlacedRows) -> None:
        # Rows of its own are not rounded where they stay, so the sum of all goes to other definitions as it is.
        others = (self._brought(whole, home, f"{self.at[home]}.grad", exact=True) for home in one.defs[1:])
        found = [whole, *others]
        made = zip(one.defs, found, strict=True)
        one.then([Gradient(one.value, home, each.records.rows, home, each.records.ids) for home, each in made])

    def _gathered(self, one: _Begun) -> _PlacedRows:
        """The rows of all lists of a parameter where its first definition lies."""
        main, wanted, only = one.defs[0], one.result, len(one.lists) == 1
        brought = [self._brought(given, main, wanted, only=only) for given in one.lists]
        if only:
            return brought[0]
        return self._listed(
            main, self._appended(self.comm, main.group, [each.records for each in brought], wanted, True)
        )

    def _joinable(self, one: _Begun) -> Hashable | None:
        """A key that is equal for rows that can be joined in one AllGather along their first dim; None for others."""
        placed, main = one.lists[0], one.defs[0]
        shape = placed.records.rows.shape
        if (
            len(one.lists) > 1
            or placed.rows.group != main.group
            or shape is None
            or len(shape) != 2
            or any(main.layout.cuts)
        ):
            return None
        moves = lower(placed.rows.layout, main.layout, main.group, main.group)
        if len(moves) != 1 or not isinstance(moves[0], AllGather):
            return None
        return main.group, placed.rows.layout, shape[0], placed.rows.value.dtype

    def _joined(self, started: Sequence[_Begun]) -> Callable[[], list[_PlacedRows]]:
        """Gathers the ids of several parameters as columns of one value, and their rows side by side; what comes back takes them apart."""
        lists, group, names = [one.lists[0] for one in started], started[0].defs[0].group, named_rows(started[0].result)
        axis = self.job.constant(group, self.job.value(group, f"{started[0].result}.axis"), np.array([1], np.int64))
        columns = [
            self.comm.derived_op(group, "Unsqueeze", [one.records.ids, axis], one.records.ids, "column")
            for one in lists
        ]
        widths = [_width(one.records.rows) for one in lists]
        kind, said = lists[0].rows.value.type, f"gradients of {len(started)} tables"
        assert kind is not None
        ids = self._side_by_side(lists[0], columns, len(started), _INT64, f"{names.ids}.joined", said)
        rows = self._side_by_side(
            lists[0], [one.records.rows for one in lists], sum(widths), kind, f"{names.rows}.joined", said
        )

        def apart() -> list[_PlacedRows]:
            wanted = [named_rows(one.result) for one in started]
            separate = [Rows(*(self.job.value(group, name) for name in (one.ids, one.rows))) for one in wanted]
            parts = [self.job.derived_on(group, one.ids, ".column") for one in separate]
            self._split(group, ids, [1] * len(started), parts)
            self._split(group, rows, widths, [one.rows for one in separate])
            flat = self.job.constant(
                group, self.job.value(group, f"{started[0].result}.flat"), np.array([-1], np.int64)
            )
            placed = []
            for given, rows_of_one, part in zip(lists, separate, parts, strict=True):
                self.comm.emit(group, "Reshape", [part, flat], rows_of_one.ids)
                mesh, values = given.rows.layout.mesh, (given.ids.value, given.rows.value)
                here = [ShardedValue(value, group, Layout.replicated(mesh, k + 1)) for k, value in enumerate(values)]
                self.comm.declare(here[0], rows_of_one.ids)
                self.comm.declare(here[1], rows_of_one.rows)
                placed.append(_PlacedRows(here[0], here[1], rows_of_one))
            return placed

        return apart

    def _side_by_side(
        self, like: _PlacedRows, terms: list[Value], width: int, kind: ir.TypeProtocol, wanted: str, said: str
    ) -> Value:
        """Gathers values of so many columns in all as one, cut as the rows of `like`."""
        group, layout = like.rows.group, like.rows.layout
        count = self.values[like.rows.value].shape
        value = self._value(wanted, kind, None if count is None else (count[0], width))
        source, target = (
            ShardedValue(value, group, layout),
            ShardedValue(value, group, Layout.replicated(layout.mesh, 2)),
        )
        joined = self.job.value(group, f"{wanted}{PARTIAL}")
        self.comm.emit(group, "Concat", terms, joined, None, axis=1)
        self.comm.declare(source, joined)
        return self._moved(source, joined, target, wanted, said)

    def _split(self, group: Group, given: Value, widths: list[int], made: list[Value]) -> None:
        """Takes columns apart."""
        sizes = self.comm.constant(group, given, "widths", widths)
        self.comm.append(group, computed("Split", [given, sizes], made, Value(".split", given), axis=1))

    def made_dense(self, gradient: Gradient, cotangent: ir.Value) -> Gradient:
        """The gradient as large as the table: zeros, to which the rows are added."""
        group, version = gradient.owner.group, ShardedValue(cotangent, gradient.owner.group, gradient.owner.layout)
        shape = self.values.local_shape(version)
        assert shape is not None
        assert cotangent.dtype is not None
        assert gradient.ids is not None
        dense = self.job.value(group, str(gradient.value).removesuffix(".rows"))
        sizes = self.comm.constant(group, dense, "shape", [int(dim) for dim in shape])
        axis = self.comm.constant(group, dense, "axis", [1])
        places = self.comm.derived_op(group, "Unsqueeze", [gradient.ids, axis], dense, "places")
        zero = ir.tensor(np.zeros(1, cotangent.dtype.numpy()))
        zeros = self.job.derived_on(group, dense, ".zeros")
        self.comm.emit(group, "ConstantOfShape", [sizes], zeros, value=zero)
        self.comm.emit(group, "ScatterND", [zeros, places, gradient.value], dense, reduction="add")
        self.comm.declare(version, dense)
        return Gradient(gradient.parameter, gradient.owner, dense, gradient.share)

    def _of_all_parts(self, group: Group, one: Rows) -> Rows:
        """The rows of all parts of a batch: an op with that of one part as its operand, which stands for those of all."""
        if self.parts == 1:
            return one
        joined: list[Value] = []
        for given in (one.ids, one.rows):
            shape = given.shape
            whole = None if shape is None else (_times(shape[0], self.parts), *shape[1:])
            joined.append(self.job.value(group, f"{str(given).removesuffix(PARTIAL)}.parts"))
            self.comm.emit(group, "Concat", [given], joined[-1], None, axis=0)
            self.job.declare(group, joined[-1], self._value(str(joined[-1]), _kind(given), whole), whole)
            self.job.concatenated.add(group, joined[-1], None)
        return Rows(*joined)

    def _listed(self, version: ShardedValue, rows_given: Rows) -> _PlacedRows:
        """The layout of ids and rows on a group: partial values are parts of the list."""
        table, layout = version.value, version.layout
        first = (*layout.cuts[0], *(axis for axis, _ in layout.partial))
        ids, rows = normal(Layout(layout.mesh, (first,))), normal(Layout(layout.mesh, (first, *layout.cuts[1:])))
        shape = rows_given.ids.shape
        count = _times(shape[0], ids.num_shards(0)) if shape else None
        width = self.values[table].shape
        assert table.type is not None
        assert width is not None
        made = (
            self._value(str(rows_given.ids), _INT64, None if count is None else (count,)),
            self._value(str(rows_given.rows), table.type, None if count is None else (count, *width[1:])),
        )
        return _PlacedRows(
            ShardedValue(made[0], version.group, ids), ShardedValue(made[1], version.group, rows), rows_given
        )

    def _value(self, name: str, kind: ir.TypeProtocol, shape: Shape | None) -> ir.Value:
        value = ir.Value(name=name.removesuffix(PARTIAL), type=kind, shape=None if shape is None else ir.Shape(shape))
        assert value.dtype is not None
        return self.values.add(value, ValueInfo(type_text(kind), shape, value.dtype.bitwidth // 8))

    def _appended(self, comm: CommLowering, group: Group, parts: Sequence[Rows], wanted: str, final: bool) -> Rows:
        """Lists of rows, one after the other, as one."""
        if len(parts) == 1:
            return parts[0]
        names = named_rows(wanted if final else wanted + PARTIAL)
        made = Rows(*(self.job.value(group, name) for name in (names.ids, names.rows)))
        for one, given in ((made.ids, [each.ids for each in parts]), (made.rows, [each.rows for each in parts])):
            comm.emit(group, "Concat", given, one, None, axis=0)
            shape = _joined([each.shape for each in given])
            self.job.declare(group, one, self._value(str(one), _kind(given[0]), shape), shape)
        return made

    def _brought(
        self, gradients: _PlacedRows, home: ShardedValue, wanted: str, *, only: bool = True, exact: bool = False
    ) -> _PlacedRows:
        """Brings rows to where a version of the table lies."""
        group, layout = home.group, home.layout
        ids = ShardedValue(gradients.ids.value, group, normal(Layout(layout.mesh, layout.cuts[:1])))
        rows = ShardedValue(gradients.rows.value, group, layout)
        names = named_rows(wanted)
        if not only:
            names = RowGradient(
                *(f"{str(one).removesuffix(PARTIAL)}.all" for one in (gradients.records.ids, gradients.records.rows))
            )
        cause = f"gradient of '{home.value.name}'"
        brought = []
        for source, target, value, out in (
            (gradients.ids, ids, gradients.records.ids, names.ids),
            (gradients.rows, rows, gradients.records.rows, names.rows),
        ):
            if source == target:
                brought.append(value)
                continue
            brought.append(self._moved(source, value, target, out, cause, exact=exact))
        return _PlacedRows(ids, rows, Rows(*brought))

    def _moved(
        self,
        source: ShardedValue,
        source_value: Value,
        target: ShardedValue,
        out: str,
        cause: str,
        *,
        exact: bool = False,
    ) -> Value:
        """Brings ids or rows to another layout or group, where they are called `out`. `exact`: in their own type."""
        if self.low and not exact and source.value.dtype == ir.DataType.FLOAT:
            return self._sent_low(source, source_value, target, out, cause)
        ranks = ranks_of(source.group) | ranks_of(target.group)
        return reshard(self.comm, source, source_value, target, self.job.value(ranks, out), cause)

    def _sent_low(self, source: ShardedValue, rows: Value, target: ShardedValue, out: str, cause: str) -> Value:
        """Brings rows in bfloat16; they are in their own type then."""
        kind = ir.TensorType(ir.DataType.BFLOAT16)
        value = self._value(f"{out}.bfloat16", kind, self.values[source.value].shape)
        one, other = (ShardedValue(value, version.group, version.layout) for version in (source, target))
        ranks = ranks_of(source.group) | ranks_of(target.group)
        given = self.job.derived_on(ranks, rows, ".bfloat16")
        self.comm.emit(source.group, "Cast", [rows], given, None, to=int(ir.DataType.BFLOAT16))
        self.comm.declare(one, given)
        there = reshard(self.comm, one, given, other, self.job.value(ranks, f"{out}.bfloat16"), cause)
        made = self.job.value(target.group, out)
        self.comm.emit(target.group, "Cast", [there], made, None, to=int(ir.DataType.FLOAT))
        self.comm.declare(target, made)
        return made


def _width(value: Value) -> int:
    assert value.shape is not None
    return int(value.shape[1])


def _kind(value: Value) -> ir.TypeProtocol:
    assert value.of is not None
    assert value.of.type is not None
    return value.of.type


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
