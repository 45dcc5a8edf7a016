"""How ops carry shard places and partial values: one table per fact; ops in no table are unknown.

A value's places are by dim where the shards of some ranks begin in it, None along a dim of which that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onnx import ModelProto, NodeProto, numpy_helper
from partc.runtime.artifact.format import MAX, MIN, SUM
from partc.runtime.artifact.graph.onnx_graph import integer_of

Begins: TypeAlias = tuple[int, ...]
"""By rank, in the order of the ranks of a file, the element at which a shard begins along a dim."""
Places: TypeAlias = "Sequence[Begins | None] | None"
Sizes: TypeAlias = "Sequence[int | None]"

_LINEAR = {
    "Cast",
    "Expand",
    "Flatten",
    "Identity",
    "Neg",
    "Pad",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Slice",
    "Split",
}
_LINEAR |= {
    "Gather",
    "GatherElements",
    "GatherND",
    "Squeeze",
    "Transpose",
    "Trilu",
    "Unsqueeze",
    "AveragePool",
    "GlobalAveragePool",
}
_ADDING = {"Add", "Concat", "Sub", "Sum"}
_PRODUCTS = {"Conv", "Gemm", "MatMul", "Mul"}
_UNARY = {
    "Abs",
    "Ceil",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Log",
    "Mish",
    "Reciprocal",
}
_UNARY |= {
    "Relu",
    "Round",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Cos",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Tanh",
    "Celu",
    "ThresholdedRelu",
}
_PAIRS = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Pow",
    "Max",
    "Min",
    "Sum",
    "Mean",
    "Where",
    "Equal",
    "Less",
    "Greater",
    "LessOrEqual",
}
_PAIRS |= {"GreaterOrEqual", "And", "Or", "Xor", "Mod", "PRelu"}
_ALONG = {"Softmax", "LogSoftmax"}
PARTIAL = {SUM: "a partial sum", MAX: "the largest of a shard", MIN: "the least of a shard"}
"""What a value is that a reduction of several ranks makes whole, in words."""
_REDUCTIONS = {"ReduceMean": SUM, "ReduceSum": SUM, "ReduceMax": MAX, "ReduceMin": MIN}
"""The reduction that makes whole what a node makes of a sharded dim."""
_MOVING = _LINEAR - {"AveragePool", "GlobalAveragePool", "Neg", "Pad", "ReduceMean", "ReduceSum", "Trilu"} | {"Concat"}
"""Ops that move elements: what they make of the largest of all is the largest of what they make."""
_RISING = {"Ceil", "Exp", "Floor", "Log", "Relu", "Round", "Sigmoid", "Sqrt", "Tanh"}
"""Functions by which the largest of all stays the largest."""
_COMPARED = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
_BROKEN = (
    _UNARY
    | _ALONG
    | {"Pow", "Max", "Min", "LayerNormalization", "RMSNormalization", "ReduceMax", "ReduceMin", "ReduceProd"}
)
_BROKEN |= {
    "ReduceSumSquare",
    "ReduceL2",
    "ReduceL1",
    "ReduceLogSumExp",
    "MaxPool",
    "ArgMax",
    "ArgMin",
    "TopK",
    "BatchNormalization",
}


@dataclass(frozen=True)
class Met:
    """A dim of an operand that meets one of another operand."""

    name: str
    begins: Begins | None


@dataclass(frozen=True)
class Ruled:
    """The effect of a node: the places of its outputs, the pairs of dims that meet in it, and the begins of dims that it sums over."""

    made: list[Places]
    meetings: list[tuple[Met, Met, int]]
    summed: list[Begins | None]


def apply(node: NodeProto, places: Mapping[str, Places], sizes: Mapping[str, Sizes], model: ModelProto) -> Ruled | None:
    """What a node does with the places of its operands; None where no table knows it."""
    match node.op_type:
        case "MatMul" | "Gemm":
            return _product(node, places, sizes)
        case "Conv":
            return _convolution(node, places, sizes)
        case op if op in _PAIRS:
            ranks = (len(places.get(name) or ()) for name in node.input)
            rank = len(sizes.get(node.output[0]) or ()) or max(ranks, default=0)
            made, meetings = _broadcast([(name, places.get(name), sizes.get(name)) for name in node.input], rank)
            return Ruled([made], meetings, [])
        case op if op in _UNARY or op in ("Identity", "Cast", "Neg"):
            return Ruled([places.get(node.input[0])], [], [])
    there = places.get(node.input[0]) if node.input else None
    if there is None:
        return None
    if node.op_type == "Transpose":
        perm = _ints(node, "perm") or list(range(len(there)))[::-1]
        return Ruled([[there[at] for at in perm]], [], []) if len(perm) == len(there) else None
    if node.op_type in _ALONG or node.op_type == "LayerNormalization":
        axis = integer_of(node, "axis", -1) % max(len(there), 1)
        last = len(there) if node.op_type == "LayerNormalization" else axis + 1
        return Ruled([[None if axis <= at < last else one for at, one in enumerate(there)]], [], [])
    if node.op_type in ("GatherElements", "ScatterElements"):
        axis = integer_of(node, "axis", 0) % max(len(there), 1)
        kept = there if node.op_type == "ScatterElements" else places.get(node.input[1])
        others = None if kept is None else [None if at == axis else one for at, one in enumerate(kept)]
        (first, second), other = node.input[:2], places.get(node.input[1])
        pairs = zip(there, other, strict=True) if other is not None and len(other) == len(there) else ()
        met = [(Met(first, one), Met(second, two), at) for at, (one, two) in enumerate(pairs) if at != axis]
        return Ruled([others], met, [])
    if node.op_type in ("Reshape", "Flatten"):
        return Ruled([_reshaped(there, sizes.get(node.input[0]), sizes.get(node.output[0]))], [], [])
    return _by_axes(node, there, model)


def _by_axes(node: NodeProto, there: Sequence[Begins | None], model: ModelProto) -> Ruled | None:
    """Reductions and changes of dims, whose axes are an attribute or a constant."""
    if node.op_type not in (*_REDUCTIONS, "Squeeze", "Unsqueeze"):
        return None
    axes = _ints(node, "axes") or _constant(node, model)
    if axes is None:
        return None
    if node.op_type == "Unsqueeze":
        left, whole = list(there), len(there) + len(axes)
        added = {axis % whole for axis in axes}
        return Ruled([[None if at in added else left.pop(0) for at in range(whole)]], [], [])
    gone = {axis % max(len(there), 1) for axis in axes} or {*range(len(there))}
    kept = node.op_type != "Squeeze" and integer_of(node, "keepdims", 1)
    made = [None if at in gone else one for at, one in enumerate(there) if kept or at not in gone]
    summed = [there[at] for at in sorted(gone) if at < len(there)] if node.op_type in _REDUCTIONS else []
    return Ruled([made], [], summed)


def _broadcast(
    operands: Sequence[tuple[str, Places, Sizes | None]], rank: int
) -> tuple[list[Begins | None], list[tuple[Met, Met, int]]]:
    """The effect of a broadcasting op: dims are aligned at the last and meet; a dim of size 1 is repeated."""
    met: list[list[Met]] = [[] for _ in range(rank)]
    for name, there, own in operands:
        if there is None or own is None or len(there) != len(own) or len(own) > rank:
            continue
        for at, (begins, size) in enumerate(zip(there, own, strict=True)):
            if size != 1:
                met[at + rank - len(own)].append(Met(name, begins))
    made = [next((each.begins for each in one if each.begins is not None), None) for one in met]
    return made, [(one[0], other, axis) for axis, one in enumerate(met) for other in one[1:]]


def _product(node: NodeProto, places: Mapping[str, Places], sizes: Mapping[str, Sizes]) -> Ruled | None:
    one, two = places.get(node.input[0]), places.get(node.input[1])
    ranks = [len(places.get(name) or sizes.get(name) or ()) for name in node.input[:2]]
    if min(ranks) < 2:
        return None
    left, right = [*(one or [None] * ranks[0])], [*(two or [None] * ranks[1])]
    if node.op_type == "Gemm" and integer_of(node, "transA", 0):
        left.reverse()
    if node.op_type == "Gemm" and integer_of(node, "transB", 0):
        right.reverse()
    meeting = (Met(node.input[0], left[-1]), Met(node.input[1], right[-2]), len(left) - 1)
    dims = [(sizes.get(name) or ())[:-2] for name in node.input[:2]]
    batch, meetings = _broadcast([*zip(node.input[:2], (left[:-2], right[:-2]), dims, strict=True)], max(ranks) - 2)
    return Ruled([[*batch, left[-2], right[-1]]], [meeting, *meetings], [left[-1], right[-2]])


def _convolution(node: NodeProto, places: Mapping[str, Places], sizes: Mapping[str, Sizes]) -> Ruled | None:
    """Channels of the image that are summed meet those of the kernel; where groups are cut, the kernel's groups meet the image's.

    A rank that has one of several groups has `group` 1, as a convolution without groups. There the channels of the kernel are whole, and
    those of the image begin as many groups in as the outputs of the kernel do.
    """
    one, two = places.get(node.input[0]), places.get(node.input[1])
    if one is None or two is None or len(one) != len(two):
        return None
    made = [one[0], two[0], *([None] * (len(one) - 2))]
    group, channels, outputs = (
        integer_of(node, "group", 1),
        *((sizes.get(name) or [None] * 2)[at] for name, at in ((node.input[0], 1), (node.input[1], 0))),
    )
    taken, given = (_in_groups(begins, size, group) for begins, size in ((one[1], channels), (two[0], outputs)))
    whole = two[1] is not None and not any(two[1])
    if group != 1 or (whole and one[1] != two[1] and taken is not None and taken == given):
        return Ruled([made], [(Met(node.input[0], taken), Met(node.input[1], given), 1)], [])
    return Ruled([made], [(Met(node.input[0], one[1]), Met(node.input[1], two[1]), 1)], [one[1], two[1]])


def _in_groups(begins: Begins | None, size: int | None, group: int) -> Begins | None:
    """At which group shards of so many groups begin; None where one begins within a group."""
    width = (size or 0) // group
    if begins is None or not width or any(begin % width for begin in begins):
        return None
    return tuple(begin // width for begin in begins)


def _reshaped(there: Sequence[Begins | None], old: Sizes | None, new: Sizes | None) -> Places:
    """Dims in front and at the end that stay are as they were.

    Not those beside a dim of size 1 that comes or goes: of `[8] -> [1, 8]` the shard is that of either dim, as the whole tells, which is
    not known here.
    """
    if old is None or new is None or len(old) != len(there):
        return None
    front, most = 0, min(len(old), len(new))
    while front < most and old[front] is not None and old[front] == new[front]:
        front += 1
    back = 0
    while back < most - front and old[-1 - back] is not None and old[-1 - back] == new[-1 - back]:
        back += 1
    between = (*old[front : len(old) - back], *new[front : len(new) - back])
    beside = 1 if 1 in between else 0
    front, back = front - (beside if front else 0), back - (beside if back else 0)
    middle = [None] * (len(new) - front - back)
    return [*there[:front], *middle, *(there[len(there) - back :] if back else [])]


def passes_partial(node: NodeProto, reduction: Callable[[str], str]) -> str:
    """The reduction of which a node makes a partial value of those that it reads; '' where it makes none, or where that is not known.

    `reduction` tells that of an operand, '' of one that is not partial.
    """
    op, given = node.op_type, [reduction(name) for name in node.input]
    first = given[0] if given else ""
    some = next(filter(None, given), "")
    if some in (MAX, MIN):
        if op in _MOVING | _RISING or _REDUCTIONS.get(op) == first:
            return first
        return some if op in ("Add", "Concat") else ""
    if op in _LINEAR or op == "Div":
        return first
    if op == "Where":
        return next(filter(None, given[1:]), "")
    return some if op in _ADDING | _PRODUCTS else ""


def misuse(node: NodeProto, reduction: Callable[[str], str], is_known: Callable[[str], bool]) -> str:
    """Why a node must not read the partial values that it reads; '' where it may, or where no table knows."""
    op, terms = node.op_type, [name for name in node.input if reduction(name)]
    if not terms:
        return ""
    kind = reduction(terms[0])
    lost = f"'{terms[0]}' is {PARTIAL[kind]} that no collective has reduced"
    if kind in (MAX, MIN):
        breaks = op in _COMPARED | _ALONG | _PRODUCTS | {"Div", "Mod", "Pow"} or (
            op == "Sub" and reduction(node.input[1])
        )
        return f"{lost}, and {op} reads it as that of all" if breaks or _REDUCTIONS.get(op, kind) != kind else ""
    if op in _BROKEN or (op == "Div" and reduction(node.input[1])):
        return f"{lost}, and {op} of a sum is not the sum of {op} of its parts"
    if op in ("Add", "Sub", "Sum"):
        others = [name for name in node.input if name and not reduction(name) and is_known(name)]
        return f"{lost}, and '{others[0]}', which is replicated, would be added on every rank" if others else ""
    if op in _PRODUCTS and all(reduction(name) for name in node.input[:2]) and len(node.input) > 1:
        return f"{lost}, nor is '{node.input[1]}', which it is multiplied by"
    return ""


def reduction_of(node: NodeProto) -> str:
    """The reduction of the partial values that a node makes which reduces, or sums products, over a sharded dim."""
    return _REDUCTIONS.get(node.op_type, SUM)


def _ints(node: NodeProto, name: str) -> list[int]:
    return next((list(one.ints) for one in node.attribute if one.name == name), [])


def _constant(node: NodeProto, model: ModelProto) -> list[int] | None:
    """The numbers of a node's second operand, where that is a weight or a constant."""
    if len(node.input) < 2 or not node.input[1]:
        return []
    for tensor in model.graph.initializer:
        if tensor.name == node.input[1] and not tensor.external_data:
            return [int(number) for number in numpy_helper.to_array(tensor).reshape(-1)]
    for other in model.graph.node:
        if other.op_type == "Constant" and other.output[0] == node.input[1]:
            return _ints(other, "value_ints") or next(
                (
                    [*map(int, numpy_helper.to_array(one.t).reshape(-1))]
                    for one in other.attribute
                    if one.name == "value"
                ),
                None,
            )
    return None
