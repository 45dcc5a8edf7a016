"""The sizes of values that only a run tells, as if each expert had as many rows as the others.

    rows [m, a] by Route -> [m, a]      Split(sorted [m, a], lengths) -> m / experts rows each      MatMul, Concat, ScatterND -> [m, b]

A Route gives a rank as many rows as it sends, if its result has no other size. A number that a shape is made of is followed through the
nodes that make it of sizes and constants. What no rule here knows stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from onnx import numpy_helper
from partc.compiler.ops.registry import entry_of_op
from partc.runtime.artifact.graph.onnx_graph import integer_of

if TYPE_CHECKING:
    from onnx import NodeProto, TensorProto

Sizes: TypeAlias = tuple[int, ...]
Known: TypeAlias = Sizes | None
_MOST_NUMBERS = 16
"""The most numbers of a constant that are read: shapes and axes have fewer."""


class EvenRows:
    """The rules for the nodes of one segment, by the names of values there.

    `sizes_of`: the sizes of a value. `constants`: the segment's own. `arriving`: the numbers of a value that another segment makes.
    """

    def __init__(
        self,
        nodes: Sequence[NodeProto],
        sizes_of: Callable[[str], Known],
        constants: Mapping[str, TensorProto],
        arriving: Callable[[str], Known],
    ) -> None:
        self.makers = {name: node for node in nodes for name in node.output}
        self.sizes_of, self.constants, self.arriving = sizes_of, constants, arriving

    def outputs(self, node: NodeProto) -> Sequence[Known]:
        """Returns the sizes of a node's outputs, None for each that is not known."""
        inputs = [self.sizes_of(name) if name else None for name in node.input]
        rule, entry = _RULES.get(node.op_type), entry_of_op(node.domain, node.op_type)
        if rule is not None:
            found = rule(self, node, inputs)
            return found if isinstance(found, list) else [found] * len(node.output)
        if entry is not None and entry.is_elementwise and inputs and None not in inputs:
            return [broadcast([one for one in inputs if one is not None])] * len(node.output)
        return [None] * len(node.output)

    def numbers(self, name: str) -> Known:
        """Returns the numbers of a value that is made of sizes and constants; None for any other."""
        if (constant := self.constants.get(name)) is not None:
            return tuple(numpy_helper.to_array(constant).reshape(-1).tolist()) if _is_small(constant) else None
        if (node := self.makers.get(name)) is None:
            return self.arriving(name)
        inputs = [self.numbers(one) for one in node.input[:2]] if node.op_type != "Shape" else []
        match node.op_type:
            case "Shape":
                sizes = self.sizes_of(node.input[0])
                ends = integer_of(node, "start", 0), integer_of(node, "end", len(sizes or ()))
                return None if sizes is None else sizes[slice(*ends)]
            case "Squeeze" | "Unsqueeze" | "Identity" | "Cast" | "Reshape":
                return inputs[0]
            case "Gather" if inputs[0] is not None and inputs[1] is not None:
                return tuple(inputs[0][at] for at in inputs[1])
            case "Concat":
                parts = [self.numbers(one) for one in node.input]
                return None if None in parts else tuple(at for part in parts if part is not None for at in part)
            case _:
                return None


def _is_small(tensor: TensorProto) -> bool:
    return math.prod(tensor.dims) <= _MOST_NUMBERS and not tensor.external_data


def broadcast(inputs: Sequence[Sizes]) -> Sizes:
    """Returns the sizes of an elementwise result."""
    count = max(map(len, inputs), default=0)
    padded = [(1,) * (count - len(one)) + one for one in inputs]
    return tuple(next((size for size in dims if size != 1), 1) for dims in zip(*padded, strict=True))


def _split(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> list[Known]:
    sizes, count = inputs[0], len(node.output)
    if sizes is None:
        return [None] * count
    axis = integer_of(node, "axis", 0) % len(sizes)
    lengths = rows.numbers(node.input[1]) if len(node.input) > 1 else None
    if lengths is None or len(lengths) != count:
        lengths = tuple(sizes[axis] // count + (k < sizes[axis] % count) for k in range(count))
    return [(*sizes[:axis], length, *sizes[axis + 1 :]) for length in lengths]


def _concat(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    some = [one for one in inputs if one is not None]
    if len(some) < len(inputs) or not some:
        return None
    axis = integer_of(node, "axis", 0) % len(some[0])
    return (*some[0][:axis], sum(one[axis] for one in some), *some[0][axis + 1 :])


def _matmul(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    a, b = inputs[:2]
    return (*broadcast([a[:-2], b[:-2]]), a[-2], b[-1]) if a and b and min(len(a), len(b)) > 1 else None


def _gemm(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    a, b = inputs[:2]
    return (a[integer_of(node, "transA", 0)], b[1 - integer_of(node, "transB", 0)]) if a and b else None


def _gather(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    data, at = inputs
    if data is None or at is None:
        return None
    if node.op_type == "GatherND":
        return (*at[:-1], *data[at[-1] :])
    axis = integer_of(node, "axis", 0) % len(data)
    return (*data[:axis], *at, *data[axis + 1 :])


def _reshape(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    target, sizes = rows.numbers(node.input[1]), inputs[0]
    if target is None or -1 not in target:
        return target if integer_of(node, "allowzero", 0) or 0 not in (target or ()) else None
    rest = math.prod(size for size in target if size != -1)
    known = sizes is not None and rest
    return tuple(math.prod(sizes or ()) // rest if size == -1 else size for size in target) if known else None


def _squeeze(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    sizes, axes = inputs[0], rows.numbers(node.input[1]) if len(node.input) > 1 else None
    if sizes is None:
        return None
    if node.op_type == "Unsqueeze":
        axes = axes or (len(sizes),)
        found = list(sizes)
        for axis in sorted(axis % (len(sizes) + len(axes)) for axis in axes):
            found.insert(axis, 1)
        return tuple(found)
    left = {axis % len(sizes) for axis in axes} if axes else {k for k, size in enumerate(sizes) if size == 1}
    return tuple(size for k, size in enumerate(sizes) if k not in left)


def _range(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    ends = [rows.numbers(name) for name in node.input]
    if any(one is None or len(one) != 1 for one in ends):
        return None
    ((begin,), (end,), (step,)) = (one or (0,) for one in ends)
    return (len(range(begin, end, step)),)


def _topk(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    count = rows.numbers(node.input[1])
    if inputs[0] is None or count is None:
        return None
    axis = integer_of(node, "axis", -1) % len(inputs[0])
    return (*inputs[0][:axis], count[0], *inputs[0][axis + 1 :])


def _slice(rows: EvenRows, node: NodeProto, inputs: Sequence[Known]) -> Known:
    sizes, ends = inputs[0], [rows.numbers(name) for name in node.input[1:3]]
    if sizes is None or None in ends or len(node.input) > 3:
        return None
    begins, stops = (one or () for one in ends)
    cut = (len(range(*slice(*pair).indices(size))) for *pair, size in zip(begins, stops, sizes, strict=False))
    return (*cut, *sizes[len(begins) :])


_RULES: Mapping[str, Callable[[EvenRows, NodeProto, Sequence[Known]], list[Known] | Known]] = {
    "Concat": _concat,
    "ConstantOfShape": lambda rows, node, inputs: rows.numbers(node.input[0]),
    "Gather": _gather,
    "GatherND": _gather,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "MatMulNBits": lambda rows, node, inputs: inputs[0] and (*inputs[0][:-1], integer_of(node, "N", 1)),
    "Range": _range,
    "Reshape": _reshape,
    "ScatterElements": lambda rows, node, inputs: inputs[0],
    "ScatterND": lambda rows, node, inputs: inputs[0],
    "Shape": lambda rows, node, inputs: None if inputs[0] is None else (len(inputs[0]),),
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "TopK": _topk,
    "Unsqueeze": _squeeze,
}
"""Maps an op to the rule for the sizes of its outputs; an elementwise op has its inputs' sizes, broadcast."""
