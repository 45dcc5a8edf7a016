"""Borders of bodies of If and Loop that stay bodies: the nodes between them are placed and sharded like those of any graph (`unroll.py`).

    Begin(count, going) -> turn, going'        Carry(x, turn) -> h           a Loop's turn begins, with each of its states
    ... nodes of a turn ...
    End(going'', turn) -> ended                Carried(h', h, ended) -> x'   a turn ends; the states after the last turn
                                               Stack(y, ended) -> ys         the values of all turns, along a new dim

    Begin(condition) -> taken   ... the one branch ...   Otherwise(taken) -> other   ... the other branch ...
    End(taken, other) -> ended                 Either(a, b, ended) -> y      the result of the branch that ran

A state has one layout: that of its `Carry`, which its `Carried` takes over. Conditions and counts are replicated. `lower/bodies.py` writes
the borders on all ranks of the group, which all take the same branch, and the same turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ops.node import LETTERS, rank_of, same
from partc.compiler.ops.registry import op
from partc.compiler.ops.rule import OWN, WHOLE, Rule

BEGIN, OTHERWISE, END = "Begin", "Otherwise", "End"
CARRY, CARRIED, STACK, EITHER = "Carry", "Carried", "Stack", "Either"
KIND, IF, LOOP = "kind", "If", "Loop"
BORDERS = (BEGIN, OTHERWISE, END, CARRY, CARRIED, STACK, EITHER)

_DECLARED = {
    name: op(name, domain=OWN, factors="_->_", rounds="exact", remarks="the border of a body") for name in (*BORDERS,)
}


def is_border(node: ir.Node) -> bool:
    """Whether a node is a border of a body."""
    return node.domain == OWN and node.op_type in BORDERS


def kind_of(node: ir.Node) -> str:
    """The op that has the body: If or Loop."""
    return node.attributes.get_string(KIND, LOOP)


def carry_of(carried: ir.Node) -> ir.Node:
    """The `Carry` of a `Carried`."""
    state = carried.inputs[1]
    found = None if state is None else state.producer()
    assert found is not None, carried.name
    return found


def at_border(border: ir.Node) -> list[ir.Node]:
    """The nodes of the states or results that a `Begin` or `End` has, in their order."""
    readers = [use.node for use in border.outputs[0].uses() if is_border(use.node)]
    of_values = [node for node in readers if node.op_type in (CARRY, CARRIED, EITHER)]
    return [*of_values, *(node for node in readers if node.op_type == STACK)]


def between_borders(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """The nodes of bodies, among those of a graph in order."""
    depth, inside = 0, set[ir.Node]()
    for node in nodes:
        if is_border(node) and node.op_type in (BEGIN, END):
            depth += 1 if node.op_type == BEGIN else -1
        elif depth:
            inside.add(node)
    return inside


def _shared(count: int) -> Callable[[ir.Node], Rule | None]:
    """The rule of a node whose first `count` operands have the dims of its result; the last one is replicated."""

    def sharding(node: ir.Node) -> Rule | None:
        rank = rank_of(node.inputs[0])
        if rank is None or any(rank_of(value) != rank for value in node.inputs[:count]):
            return None
        letters = LETTERS[:rank].ljust(rank, WHOLE)
        made = WHOLE + letters if node.op_type == STACK else letters
        return Rule((*[letters] * count, *(_whole(value) for value in node.inputs[count:])), (made,))

    return sharding


def _replicated(node: ir.Node) -> Rule | None:
    return Rule(tuple(_whole(value) for value in node.inputs), tuple(_whole(value) for value in node.outputs))


def _whole(value: ir.Value | None) -> str | None:
    rank = rank_of(value)
    return None if rank is None else WHOLE * rank


def _shapes(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """The result has the type of the first operand; a dim in which a branch differs is not known, nor is the number of turns."""
    value, out = node.inputs[0], node.outputs[0]
    if node.op_type == BEGIN and kind_of(node) == LOOP:
        for made, dtype in zip(node.outputs, (ir.DataType.INT64, ir.DataType.BOOL), strict=True):
            rank = node.attributes.get_int(f"{dtype.name.lower()}_rank", 0)
            ctx.set_shape_and_dtype(made, ir.Shape([1] * rank), dtype)
        return
    if value is None or value.dtype is None:
        return
    shape = value.shape
    if node.op_type == STACK and shape is not None:
        length = node.attributes.get_string("length", "")
        turns = int(length) if length.isdecimal() else ir.SymbolicDim(length) if length else ctx.new_symbolic_dim()
        shape = ir.Shape([turns, *shape.dims])
    if node.op_type == EITHER and shape is not None:
        other = None if node.inputs[1] is None else node.inputs[1].shape
        alike = other is not None and len(other) == len(shape)
        pairs = zip(shape, other or (), strict=True) if alike else ()
        shape = ir.Shape([a if same(a, b) else ctx.new_symbolic_dim() for a, b in pairs]) if alike else None
    ctx.set_shape_and_dtype(out, shape, value.dtype)


_RULES: dict[str, Callable[[ir.Node], Rule | None]] = {
    CARRY: _shared(1),
    CARRIED: _shared(2),
    STACK: _shared(1),
    EITHER: _shared(2),
}
for _name, _entry in _DECLARED.items():
    _entry.sharding(_RULES.get(_name, _replicated))
    _entry.shapes(_shapes)
