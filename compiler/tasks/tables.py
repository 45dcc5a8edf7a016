"""Tables: parameters whose rows are looked up; which of them get their gradient as ids and rows, and why.

A gradient by rows says all that a dense one does where every read of a parameter, through which a gradient flows, takes rows of it. The
update must leave all other rows as they are: of a formula that does, such as plain SGD, the result is that of the dense gradient up to
rounding, so it is taken where rows are fewer than half of the table.

    table.weight [100000, 16]: gradient by rows: 32 of its rows are looked up a step
    wte.weight [50257, 768]: dense gradient: head.MatMul reads it whole
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.program import Program
from partc.compiler.ir.training import Training
from partc.compiler.lower.pulls import is_pulled
from partc.compiler.ops.registry import looks_up_rows, stops_gradient
from partc.compiler.placement.middling import Middling
from partc.compiler.sharding.operands import input_layout_of
from partc.compiler.tasks.duals import dual_of_input
from partc.compiler.tasks.local_view import LocalView
from partc.compiler.training.optimizers import whole_table


@dataclass(frozen=True)
class Table:
    """A parameter of which nodes look rows up; `by_rows`: whether its gradient is ids and rows; `why` in words."""

    parameter: ir.Value
    by_rows: bool
    why: str

    def __str__(self) -> str:
        shape = list(self.parameter.shape.dims) if self.parameter.shape is not None else "?"
        form = "gradient by rows" if self.by_rows else "dense gradient"
        return f"{self.parameter.name} {shape}: {form}: {self.why}"


def find_tables(program: Program, local: LocalView, needed: Collection[ir.Value]) -> list[Table]:
    """The tables among the parameters that need a gradient, in the order of the model."""
    training = program.training
    assert training is not None
    readers: dict[ir.Value, list[ir.Node]] = {value: [] for value in training.parameters if value in needed}
    for node, values in program.reads.items():
        for value in values if not stops_gradient(node) else ():
            if value in readers:
                readers[value].append(node)
    found = []
    for value, nodes in readers.items():
        lookups = [node for node in nodes if _looks_up(program, node, value)]
        if lookups:
            why = _whole(program, training, local, value, [node for node in nodes if node not in lookups], lookups)
            rows = _rows(program, local, lookups)
            size = value.shape[0] if value.shape is not None else None
            if not why and rows is not None and isinstance(size, int) and 2 * rows > size:
                why = f"{rows} rows are looked up a step, more than half"
            counted = "rows" if rows is None else f"{rows} of its rows"
            found.append(Table(value, not why, why or f"{counted} are looked up a step"))
    return found


def _looks_up(program: Program, node: ir.Node, value: ir.Value) -> bool:
    others = [one for one in node.inputs[1:] if one is value]
    return node.inputs[0] is value and not others and value not in program.around[node] and looks_up_rows(node)


def _whole(
    program: Program,
    training: Training,
    local: LocalView,
    value: ir.Value,
    others: list[ir.Node],
    lookups: list[ir.Node],
) -> str:
    """Why a table needs a dense gradient; empty where it does not."""
    if others:
        return f"{program.paths[others[0]]} reads it whole"
    if why := whole_table(training.optimizer_of(value), training.parameters[value].weight_decay):
        return why
    if all(is_pulled(program, one) for one in _instances(program, lookups)):
        return ""  # each rank is given those of its own rows
    layouts = [home.layout for home in local.versions.defs.get(value, ())]
    layouts += [input_layout_of(program, one, 0).layout for one in _instances(program, lookups)]
    return "its rows are cut" if any(layout.cuts and layout.cuts[0] for layout in layouts) else ""


def _instances(program: Program, nodes: list[ir.Node]) -> Iterator[NodeOnGroup]:
    return (NodeOnGroup(node, group) for node in nodes for group in program.placement[node].groups)


def _rows(program: Program, local: LocalView, lookups: list[ir.Node]) -> int | None:
    """How many rows are looked up a step by all ranks, at middling sizes; None where some number is not known."""
    assert program.training is not None
    sizes, total = Middling(program), 0
    for one in _instances(program, lookups):
        ids = one.node.inputs[1]
        shape = local.comm.values.local_shape(input_layout_of(program, one, 1)) if ids is not None else None
        if shape is None:
            return None
        layout = dual_of_input(program, one, 0)
        terms = math.prod(layout.mesh[axis] for axis, _ in layout.partial)
        if is_pulled(program, one):
            asked = input_layout_of(program, one, 1).layout
            terms = math.prod(asked.num_shards(dim) for dim in range(len(asked.cuts)))
        total += math.prod(map(sizes.dim, shape)) * terms
    return total * program.training.accumulate
