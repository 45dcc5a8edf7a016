"""The parts of a dim that the graph requests: those that Split, Slice and Gather take, through ops that treat the dim's elements alike.

A dim is followed through an op by its letter in the op's rule, if the plain op on a part gives that part of the result. Parts are fractions
of the dim, which a Reshape to (3, heads, size) preserves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import onnx_ir as ir
from partc.compiler.ir.graph import Reads
from partc.compiler.ops.node import axes_of, axis_of, constant_ints, dims
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import WHOLE

_PLAIN = ("ExpertMatMul", "ExpertMatMulNBits", "Gather", "GatherND", "Gemm", "Reshape")
"""Ops whose rule rewrites a node, except along a dim that passes through unchanged; a Reshape gets another target."""

_TAKING = frozenset({"Split", "Slice", "Gather", "If", "Loop", "Scan", "SequenceMap"})


@dataclass(frozen=True)
class Outlet:
    """An output that is just a part of a dim, from `begin` to `end`; `drops`: whether the output lacks the dim."""

    value: ir.Value
    begin: Fraction
    end: Fraction
    drops: bool = False


def through(node: ir.Node, k: int, dim: int) -> int | None:
    """Returns the dim of the node's only output whose parts are those of dim `dim` of operand `k`, or None."""
    if any(out.uses() or out.is_graph_output() for out in node.outputs[1:]):
        return None
    rule = rule_of(node)
    letters = rule.inputs[k] if k < len(rule.inputs) else None
    output_letters = rule.outputs[0]
    letter = letters[dim] if letters and dim < len(letters) else WHOLE
    if (
        letter == WHOLE
        or letter in rule.replicated
        or letter in rule.units
        or output_letters is None
        or letter not in output_letters
    ):
        return None
    if rule.local is not None and node.op_type not in _PLAIN:
        return None
    return output_letters.index(letter)


def outlets(node: ir.Node, k: int, dim: int) -> list[Outlet] | None:
    """Returns the parts that the node takes of dim `dim` of operand `k`; None if it does not take it apart."""
    shape = dims(node.inputs[k])
    size = shape[dim] if shape is not None else None
    if k or not isinstance(size, int) or shape is None:
        return None
    match node.op_type:
        case "Split" if axis_of(node, len(shape), 0) == dim:
            return _split(node, dim, size)
        case "Slice":
            return _slice(node, dim, size, len(shape))
        case "Gather" if axis_of(node, len(shape), 0) == dim:
            return _gather(node, size)
    return None


def taken_apart(reads: Reads) -> set[ir.Value]:
    """Returns the values of which a part may be requested: operands of Split, Slice, Gather and bodies, and all values before these."""
    found: set[ir.Value] = set()
    for node, values in reversed(reads.items()):
        if node.op_type in _TAKING or not found.isdisjoint(node.outputs):
            found.update(values)
    return found


def requested_bounds(value: ir.Value, dim: int) -> list[Fraction]:
    """Returns the bounds of all requested parts as fractions, ascending from 0 to 1; [0, 1] if no reader takes the dim apart."""
    return sorted({Fraction(0), Fraction(1), *_ends(value, dim)})


def _ends(value: ir.Value, dim: int) -> Iterator[Fraction]:
    for use in value.uses():
        found = outlets(use.node, use.idx, dim)
        if found is not None:
            for outlet in found:
                yield from (outlet.begin, outlet.end)
        elif (after := through(use.node, use.idx, dim)) is not None:
            yield from _ends(use.node.outputs[0], after)


def _split(node: ir.Node, dim: int, size: int) -> list[Outlet] | None:
    parts_found, begin = [], 0
    for out in node.outputs:
        shape = dims(out)
        length = shape[dim] if shape is not None else None
        if not isinstance(length, int):
            return None
        parts_found.append(Outlet(out, Fraction(begin, size), Fraction(begin + length, size)))
        begin += length
    return parts_found if begin == size else None


def _slice(node: ir.Node, dim: int, size: int, rank: int) -> list[Outlet] | None:
    starts, ends = constant_ints(node, 1), constant_ints(node, 2)
    axes = axes_of(node, rank, 3) or tuple(range(len(starts or ())))
    strides = constant_ints(node, 4) if len(node.inputs) > 4 and node.inputs[4] is not None else (1,)
    if starts is None or ends is None or axes != (dim,) or strides != (1,):
        return None
    begin, end, _ = slice(starts[0], ends[0]).indices(size)
    return [Outlet(node.outputs[0], Fraction(begin, size), Fraction(end, size))] if begin < end else None


def _gather(node: ir.Node, size: int) -> list[Outlet] | None:
    index, shape = constant_ints(node, 1), dims(node.inputs[1])
    if index is None or shape is None or len(index) != 1 or len(shape) > 1 or not -size <= index[0] < size:
        return None
    at = index[0] % size
    return [Outlet(node.outputs[0], Fraction(at, size), Fraction(at + 1, size), drops=not shape)]
