"""Tables: parameters whose rows are looked up; which of them get their gradient as ids and rows, and why.

A gradient by rows says all that a dense one does where every read of a parameter, through which a gradient flows, takes rows of it. The
update must leave all other rows as they are. Of a formula that does so by itself, such as plain SGD, the result is that of the dense
gradient up to rounding, so rows are taken where they are fewer than half of the table; a lazy formula is made for them. Where an update
changes all rows (Adam), the gradient travels as rows if these are certainly fewer bytes than the table, and is made dense behind that.

    table.weight [100000, 16]: gradient by rows: 32 of its rows are looked up a step
    items.weight [100000, 16]: gradient by rows between ranks, dense in the update: adam changes all rows in every step
    wte.weight [50257, 768]: dense gradient: head.MatMul reads it whole
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.dims.expression import facts_of
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.program import Targeted
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.ir.training import Training
from partc.compiler.lower.local_view import LocalView
from partc.compiler.lower.pulls import is_pulled
from partc.compiler.ops.families.control.bodies import between_borders
from partc.compiler.ops.registry import looks_up_rows, stops_gradient
from partc.compiler.placement.typical_sizes import TypicalSizes
from partc.compiler.sharding.values.operands import input_layout_of
from partc.compiler.tasks.duals import dual_of_input
from partc.compiler.training.optimizers import whole_table


@dataclass(frozen=True)
class Table:
    """A parameter of which nodes look rows up. `by_rows`: whether its gradient is ids and rows; `dense_update`: these are made a dense one
    where the parameter is updated; `why` in words.
    """

    parameter: ir.Value
    by_rows: bool
    dense_update: bool
    why: str

    def __str__(self) -> str:
        shape = list(self.parameter.shape.dims) if self.parameter.shape is not None else "?"
        form = "gradient by rows" if self.by_rows else "dense gradient"
        form += " between ranks, dense in the update" if self.by_rows and self.dense_update else ""
        return f"{self.parameter.name} {shape}: {form}: {self.why}"


def find_tables(program: Targeted, local: LocalView, needed: Collection[ir.Value]) -> list[Table]:
    """The tables among the parameters that need a gradient, in the order of the model; CompileError where a lazy formula has no rows."""
    training = program.training
    assert training is not None
    readers: dict[ir.Value, list[ir.Node]] = {value: [] for value in training.parameters if value in needed}
    for node, values in program.reads.items():
        for value in values if not stops_gradient(node) else ():
            if value in readers:
                readers[value].append(node)
    tables, problems, inside = list[Table](), list[Problem](), between_borders(program.reads)
    for value, nodes in readers.items():
        # A node that also reads it as something else, or in its bodies, needs all of it; so do turns, whose gradients are added up.
        alone = [
            node for node in nodes if node.inputs[0] is value and value not in node.inputs[1:] and node not in inside
        ]
        lookups = [node for node in alone if value not in program.around[node] and looks_up_rows(node)]
        if lookups:
            others = [node for node in nodes if node not in lookups]
            tables.append(_Lookups(program, training, local, value, lookups, others).table())
            if training.parameters[value].staleness and training.optimizer_of(value).is_lazy:
                fact = f"'{value.name}' is updated late, by {training.optimizer_of(value).type}"
                law = "gradients wait as whole tables, and this optimizer wants the rows that were looked up"
                where = training.parameters[value].where["staleness"]
                problems.append(Problem(where, fact, law, "leave out 'staleness', or take another optimizer"))
            if tables[-1].why == _CUT and training.optimizer_of(value).is_lazy:
                law = f"{training.optimizer_of(value).type} wants the rows that were looked up, and ranks with a part of them know no ids"
                where = training.parameters[value].where.get("optimizer", f"parameter '{value.name}'")
                help = "let ranks pull its rows, cut its columns, or give it another optimizer"
                problems.append(Problem(where, f"the rows of '{value.name}' are cut", law, help))
    if problems:
        raise CompileError(problems)
    return tables


_CUT = "its rows are cut"


@dataclass(frozen=True)
class _Lookups:
    """The nodes that look a table up, and the others that read it."""

    program: Targeted
    training: Training
    local: LocalView
    value: ir.Value
    lookups: list[ir.Node]
    others: list[ir.Node]

    def table(self) -> Table:
        """The form of the gradient."""
        optimizer, decay = self.training.optimizer_of(self.value), self.training.parameters[self.value].weight_decay
        if self.others:
            return Table(self.value, False, True, f"{self.program.paths[self.others[0]]} reads it whole")
        layouts = [home.layout for home in self._homes]
        layouts += [input_layout_of(self.program, one, 0).layout for one in self._instances]
        pulled = all(
            is_pulled(self.program, one) for one in self._instances
        )  # each rank is given those of its own rows
        if not pulled and any(layout.cuts and layout.cuts[0] for layout in layouts):
            return Table(self.value, False, True, _CUT)
        rows, size = (
            self._rows(TypicalSizes(self.program).dim),
            self.value.shape[0] if self.value.shape is not None else None,
        )
        counted = (
            f"{rows} of its rows are looked up a step"
            if rows is not None
            else "only a step tells how many rows are looked up"
        )
        if late := self.training.parameters[self.value].staleness:
            waiting = f"the gradients of {late} steps wait" if late > 1 else "the gradient of a step waits"
            return Table(self.value, self._sends_fewer(), True, f"{waiting} for the update")
        if whole := whole_table(optimizer, decay):
            return Table(self.value, self._sends_fewer(), True, whole)
        rank = len(self.value.shape or ())
        if any(optimizer.slots_of(rank).values()) and (rank != 2 or any(any(layout.cuts[1:]) for layout in layouts)):
            return Table(self.value, self._sends_fewer(), True, f"{optimizer.type} needs whole rows of a matrix")
        if not optimizer.is_lazy and rows is not None and isinstance(size, int) and 2 * rows > size:
            return Table(self.value, self._sends_fewer(), True, f"{counted}, more than half")
        return Table(self.value, True, False, counted)

    @property
    def _homes(self) -> Sequence[ShardedValue]:
        return self.local.versions.defs.get(self.value, ())

    @property
    def _instances(self) -> list[NodeOnGroup]:
        return [NodeOnGroup(node, group) for node in self.lookups for group in self.program.placement[node].groups]

    def _rows(self, sized: Callable[[int | str], int | None]) -> int | None:
        """The number of rows that all ranks look up in a step, of dims of these sizes; None where one is not known."""
        total = 0
        for instance in self._instances:
            shape = self.local.comm.values.local_shape(input_layout_of(self.program, instance, 1))
            dims = [None] if shape is None else [sized(dim) for dim in shape]
            known = [dim for dim in dims if dim is not None]
            if len(known) < len(dims):
                return None
            layout = dual_of_input(self.program, instance, 0)
            terms = math.prod(layout.mesh[axis] for axis, _ in layout.partial)
            if is_pulled(self.program, instance):
                asked = input_layout_of(self.program, instance, 1).layout
                terms = math.prod(asked.shards)
            total += math.prod(known) * terms
        return total * self.training.rules.accumulate

    def _sends_fewer(self) -> bool:
        """Whether rows, as many as there may be, are fewer bytes than the sum of tables over the ranks of a group."""
        symbols = {name: info.facts for name, info in self.program.symbols.items()}
        most = self._rows(lambda dim: facts_of(dim, symbols).max)
        terms = [
            dual_of_input(self.program, one, 0).partial and not is_pulled(self.program, one) for one in self._instances
        ]
        shape = self.value.shape
        if (
            most is None
            or shape is None
            or not shape.is_static()
            or len(self._homes) != 1
            or self.training.rules.optimizer.shard
            or not all(terms)
        ):
            return False
        size, *width = shape.numpy()
        row = math.prod(width) * (2 if self.training.low_messages else 4)
        return most * (8 + row) < 2 * size * row
