"""Finds the inputs that contain ids of rows, so that an id beyond its table is refused before a step, with its record.

An input is followed through ops that move its elements (Cast, Reshape, Concat, ...) and through one selection of columns (Slice, Split,
Gather by constants) to the indices of a Gather from a weight. The ids that a model computes are checked by the Gather itself.

    y = table_3[x[:, 3]]    ->    x: column 3 along axis 1 holds ids of table_3
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.ir.graph import name_of
from partc.compiler.ops.node import axis_of, constant_ints, dims, operand, rank_of
from partc.runtime.artifact.format import IdsRecord

_MOVES = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
"""Ops whose output has elements of their first input alone."""
_KEEPS_DIMS = {"Cast", "Identity"}


@dataclass(frozen=True)
class _Elements:
    """Elements of an input: all of them, or those at `places` along `axis`. `intact`: whether the dims are still the input's."""

    axis: int = 0
    places: tuple[int, ...] | None = None
    intact: bool = True


def looked_up(value: ir.Value) -> list[IdsRecord]:
    """The tables whose rows an input names, each with the places of the ids; tables of one size at the same places are one record."""
    if value.dtype is None or not _is_id(value.dtype):
        return []
    found: dict[tuple[int, tuple[int, ...], int], ir.Value] = {}
    for elements, table, rows in _tables(value, _Elements(), set()):
        found.setdefault((elements.axis, elements.places or (), rows), table)
    return [
        IdsRecord(table=name_of(table), rows=rows, axis=axis, places=list(places))
        for (axis, places, rows), table in found.items()
    ]


def _tables(
    value: ir.Value, elements: _Elements, seen: set[tuple[ir.Value, _Elements]]
) -> Iterator[tuple[_Elements, ir.Value, int]]:
    if (value, elements) in seen:
        return
    seen.add((value, elements))
    for use in value.uses():
        node, k = use.node, use.idx
        if node.graph is None or value.graph is not node.graph:
            continue
        if node.op_type in ("Gather", "GatherBlockQuantized") and k == 1:
            yield from _rows(node, elements)
        if node.domain not in ("", "ai.onnx"):
            continue
        for after, out in _after(node, k, elements):
            yield from _tables(out, after, seen)


def _rows(node: ir.Node, elements: _Elements) -> Iterator[tuple[_Elements, ir.Value, int]]:
    """What a Gather looks up in a weight of known rows."""
    table = operand(node, 0)
    sizes = dims(table)
    if table is None or not table.is_initializer() or not sizes:
        return
    rows = sizes[axis_of(node, len(sizes), 0)]  # GatherBlockQuantized has `gather_axis`, of bytes always 0
    if isinstance(rows, int) and rows > 0:
        yield elements, table, rows


def _after(node: ir.Node, k: int, elements: _Elements) -> Iterator[tuple[_Elements, ir.Value]]:
    """The outputs of a node that have elements of its operand `k`, and which."""
    moved = replace(elements, intact=False)
    out = node.outputs[0]
    if node.op_type == "Concat" or (k == 0 and node.op_type in _MOVES):
        if out.dtype is None or _is_id(out.dtype):
            yield elements if node.op_type in _KEEPS_DIMS else moved, out
    elif k == 0 and elements.intact and elements.places is None:
        for axis, places, one in _selected(node):
            yield _Elements(axis, places, intact=False), one


def _selected(node: ir.Node) -> Iterator[tuple[int, tuple[int, ...], ir.Value]]:
    """The axis and the places there that a selection of constants takes, for each output."""
    rank, sizes = rank_of(node.inputs[0]), dims(node.inputs[0])
    if not rank or sizes is None:
        return
    match node.op_type:
        case "Gather":
            axis, given = axis_of(node, rank, 0), constant_ints(node, 1)
            size = sizes[axis]
            if given and isinstance(size, int) and all(-size <= place < size for place in given):
                yield axis, tuple(sorted({place % size for place in given})), node.outputs[0]
        case "Split":
            axis, begin = axis_of(node, rank, 0), 0
            for out in node.outputs:
                extent = (dims(out) or (None,) * rank)[axis]
                if not isinstance(extent, int):
                    return
                yield axis, tuple(range(begin, begin + extent)), out
                begin += extent
        case "Slice":
            starts, ends, steps = (constant_ints(node, k) for k in (1, 2, 4))
            axes = constant_ints(node, 3) if operand(node, 3) is not None else tuple(range(len(starts or ())))
            if not starts or not ends or not axes or len(axes) != 1 or (operand(node, 4) is not None and not steps):
                return
            axis = axes[0] % rank
            size = sizes[axis]
            if isinstance(size, int) and (places := range(size)[starts[0] : ends[0] : (steps or (1,))[0]]):
                yield axis, tuple(sorted(places)), node.outputs[0]


def _is_id(dtype: ir.DataType) -> bool:
    """Whether numbers of a type may become ids as they are: a bool is cast to 0 or 1."""
    return dtype.is_integer() or dtype is ir.DataType.BOOL
