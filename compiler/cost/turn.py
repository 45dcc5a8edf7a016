"""A turn of a Scan in a rank's file: the nodes of its body, how often they run, and the sizes of their operands.

The sizes follow from the operands of a turn through products, reductions and broadcasting ops, of which the hops of a ring consist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from onnx import GraphProto, NodeProto
from partc.compiler.cost.sizes import Operand
from partc.runtime.artifact.graph.onnx_graph import graph_bodies, integer_of

_CONDITIONS, _BOOL = ("And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "Less", "LessOrEqual", "Not", "Or"), 1.0
"""Ops that make booleans, and the bytes of one."""


@dataclass(frozen=True)
class Turn:
    """The body of a Scan, the number of its turns, and a function that returns an operand of a turn by its name."""

    body: GraphProto
    count: int
    operand: Callable[[str], Operand]


def turn_of(node: NodeProto, of: Callable[[str], Operand]) -> Turn:
    """Returns the turn of a Scan; `of` returns an operand outside of the body by its name."""
    body = graph_bodies(node)[0]
    ints = {one.name: one.ints for one in node.attribute}
    states = len(node.input) - integer_of(node, "num_scan_inputs", 0)
    axes = {k + states: axis for k, axis in enumerate(ints.get("scan_input_axes", ()))}
    known, count = dict[str, Operand](), 0
    for k, (port, name) in enumerate(zip(body.input, node.input, strict=True)):
        outer, axis = of(name), axes.get(k, 0)
        if k >= states and outer.sizes is not None:
            count = outer.sizes[axis]
            outer = replace(outer, sizes=(*outer.sizes[:axis], *outer.sizes[axis + 1 :]))
        known[port.name] = outer

    def operand(name: str) -> Operand:
        return known[name] if name in known else of(name)

    for one in body.node:
        known |= dict.fromkeys(one.output, _result(one, [operand(name) for name in one.input if name]))
    return Turn(body, count, operand)


def _result(node: NodeProto, operands: Sequence[Operand]) -> Operand:
    """Returns the result of an op in the body of a Scan, with sizes from its operands; of unknown size if theirs is unknown."""
    item = _BOOL if node.op_type in _CONDITIONS else max((one.item for one in operands), default=0.0)
    sizes = [one.sizes for one in operands]
    if not sizes or None in sizes:
        return Operand(None, item)
    known = [one for one in sizes if one is not None]
    first = known[0]
    if node.op_type.startswith("Reduce"):
        kept = (*first[:-1], 1) if integer_of(node, "keepdims", 1) else first[:-3] + first[-2:]
        return Operand(kept, item)
    if node.op_type == "Transpose":
        perm = next((one.ints for one in node.attribute if one.name == "perm"), range(len(first))[::-1])
        return Operand(tuple(first[axis] for axis in perm), item)
    if node.op_type == "MatMul":
        return Operand((*_spread([one[:-2] for one in known]), first[-2], known[1][-1]), item)
    return Operand(_spread(known), item)


def _spread(sizes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the sizes to which several shapes broadcast."""
    rank = max(map(len, sizes))
    return tuple(max(dims) for dims in zip(*((1,) * (rank - len(one)) + one for one in sizes), strict=True))
