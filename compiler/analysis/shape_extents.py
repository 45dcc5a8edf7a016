"""Shape rules of ops whose extents are computed: ranges, slices, splits, pads, fills, and broadcasting ops.

`shape_data` knows the entries of operands; where they are unknown, or the op's law leaves two sizes open, the dim is unknown. With n any
size:

    x[a:b:c]       Max(0, ceil((end - start)/c)), both ends brought within the dim
    Range(a, b, c) Max(0, ceil((b - a)/c))
    p and q        the one that is at least 2; Max(p, q) where neither can be 0; otherwise unknown
    p and Min(p, 512)   p, for only equal sizes are legal: of one that is 1 so is the other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import sympy
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.analysis.shape_data import entries_of, integers_of, scalar_of
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import largest, read, smallest

Known = Mapping[str, Facts]
"""The facts promised for the dims that the inputs name."""

_FAR = 2**31 - 1
_OPEN_ENDS = (_FAR, 2**63 - 1)
"""Ends that mean the last in the direction of a slice."""
BROADCASTING = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Where", "PRelu"),
        *("And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    }
)
"""Ops of ai.onnx whose output shape is the broadcast of their input shapes."""


def broadcast(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Broadcasts, given that either of two different dynamic dims may be 1; the engine takes the first."""
    rule(ctx, node)
    out = node.outputs[0]
    if any(value is not None and value.shape is None for value in node.inputs):
        out.shape = None
    is_product = node.op_type == "MatMul"
    if out.shape is None or (
        is_product and any(value is not None and len(value.shape or ()) < 2 for value in node.inputs)
    ):
        return
    dims = list(out.shape.dims)
    shapes = [value.shape for value in node.inputs if value is not None and value.shape is not None]
    for place in range(3 if is_product else 1, len(dims) + 1):
        dims[-place] = _together(ctx, [shape[-place] for shape in shapes if len(shape) >= place], known)
    out.shape = ir.Shape(dims)


def expand(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Input and target broadcast both ways; of an input of unknown shape only that its rank may be larger is known."""
    data, out = node.inputs[0], node.outputs[0]
    assert data is not None
    target = entries_of(ctx, node.inputs[1])
    length = _length(node.inputs[1])
    if data.shape is None or (target is None and length is None):
        ctx.set_shape_and_dtype(out, None, data.dtype)
        return
    wanted = [None] * (length or 0) if target is None else list(target)
    rank = max(len(data.shape), len(wanted))
    have: list[Any] = [1] * (rank - len(data.shape)) + list(data.shape.dims)
    want = [1] * (rank - len(wanted)) + [ctx.new_symbolic_dim() if one is None else as_dim(one) for one in wanted]
    _set(ctx, out, [_together(ctx, [a, b], known) for a, b in zip(have, want, strict=True)], data.dtype)


def _length(value: ir.Value | None) -> int | None:
    size = value.shape[0] if value is not None and value.shape is not None and len(value.shape) == 1 else None
    return size if isinstance(size, int) else None


def _together(ctx: ShapeInferenceContext, dims: Sequence[int | ir.SymbolicDim], known: Known) -> int | ir.SymbolicDim:
    """Returns the dim to which dims broadcast."""
    different = list(dict.fromkeys(dim for dim in dims if dim != 1))
    fixed = [dim for dim in different if isinstance(dim, int)]
    if fixed or len(different) < 2:
        return (fixed or different or [1])[0]
    least: dict[int | ir.SymbolicDim, float] = {dim: _facts(dim, known).low for dim in different}
    larger = [dim for dim in least if least[dim] >= 2]
    if larger:
        return larger[0]
    expressions = [read(str(dim)) for dim in different]
    bounded = [one for one in expressions if not any(_is_bound(other, one, known) for other in expressions)]
    if len(bounded) == 1 and bounded[0] is not None:
        return as_dim(bounded[0])
    if min(least.values()) < 1 or None in expressions:
        unknown: ir.SymbolicDim = ctx.new_symbolic_dim()
        return unknown
    return as_dim(normal(largest(*expressions), known))


def _is_bound(of: sympy.Expr | None, least: sympy.Expr | None, known: Known) -> bool:
    """Whether `least` is the smaller of `of` and sizes of at least 2."""
    if of is None or not isinstance(least, sympy.Min) or of not in least.args:
        return False
    return all(one == of or facts_of(one, known).low >= 2 for one in least.args)


def concat(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Dims that are not joined are equal, so the best known of each is the result's; the engine takes the first operand's."""
    rule(ctx, node)
    out = node.outputs[0]
    if out.shape is None:
        return
    axis = node.attributes["axis"].as_int() % len(out.shape)
    dims = list(out.shape.dims)
    for k in range(len(dims)):
        if k != axis:
            there = [value.shape[k] for value in node.inputs if value is not None and value.shape is not None]
            dims[k] = min(there, key=lambda dim: (not isinstance(dim, int), not _is_known(dim, known)))
    out.shape = ir.Shape(dims)


def _is_known(dim: int | ir.SymbolicDim, known: Known) -> bool:
    expression = None if isinstance(dim, int) else read(str(dim.value))
    return isinstance(dim, int) or (
        expression is not None and all(str(name) in known for name in expression.free_symbols)
    )


def _facts(dim: int | ir.SymbolicDim, known: Known) -> Facts:
    """The facts about a dim; of a name that is not a symbol only that it is a size."""
    return facts_of(dim, known)


def constant_of_shape(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """The output's shape is the operand's entries."""
    rule(ctx, node)
    entries, length = entries_of(ctx, node.inputs[0]), _length(node.inputs[0])
    if entries is not None:
        _set(ctx, node.outputs[0], [None if one is None else as_dim(one) for one in entries.ravel()], None)
    elif length is not None:
        _set(ctx, node.outputs[0], [None] * length, None)


def range_(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """The size is the number of steps from start to limit."""
    start, limit, step = (scalar_of(ctx, value) for value in node.inputs)
    size: sympy.Expr | None = None
    if start is not None and limit is not None and isinstance(step, sympy.Rational) and step != 0:
        size = normal(largest(0, sympy.ceiling((limit - start) / step)), known)
    assert node.inputs[0] is not None
    _set(ctx, node.outputs[0], [None if size is None else as_dim(size)], node.inputs[0].dtype)


def slice_(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """The extents of a slice, its ends brought within the dim; a sliced dim is unknown where its bounds are."""
    data, out = node.inputs[0], node.outputs[0]
    assert data is not None
    if data.shape is None:
        ctx.set_shape_and_dtype(out, None, data.dtype)
        return
    starts, ends = _bounds(ctx, node, 1, "starts"), _bounds(ctx, node, 2, "ends")
    dims: list[Any] = list(data.shape.dims)
    count = next((len(one) for one in (starts, ends) if one is not None), None)
    given = _bounds(ctx, node, 3, "axes")
    axes = list(range(count or 0)) if given is None and not _has(node, 3) else given
    steps = [sympy.Integer(1)] * (count or 0) if not _has(node, 4) else _bounds(ctx, node, 4, "steps")
    if axes is None or count is None or not all(isinstance(axis, int | sympy.Integer) for axis in axes):
        _set(ctx, out, [None] * len(dims), data.dtype)
        return
    for k, axis in enumerate(int(one) % len(dims) for one in axes):
        start, end, step = (None if side is None or k >= len(side) else side[k] for side in (starts, ends, steps))
        dims[axis] = _sliced(dims[axis], start, end, step, known)
    _set(ctx, out, dims, data.dtype)


def _has(node: ir.Node, k: int) -> bool:
    return (k < len(node.inputs) and node.inputs[k] is not None) or (k == 3 and "axes" in node.attributes)


def _bounds(ctx: ShapeInferenceContext, node: ir.Node, k: int, name: str) -> list[Any] | None:
    """Returns the entries of an operand, which is an attribute in older opsets."""
    if name in node.attributes:
        return [sympy.Integer(one) for one in node.attributes[name].as_ints()]
    entries = entries_of(ctx, node.inputs[k]) if k < len(node.inputs) else None
    return None if entries is None else list(entries.ravel())


def _sliced(dim: int | ir.SymbolicDim, start: Any, end: Any, step: Any, known: Known) -> int | ir.SymbolicDim | None:
    size = sympy.Integer(dim) if isinstance(dim, int) else read(str(dim.value))
    if size is None or start is None or end is None or not isinstance(step, sympy.Integer) or step == 0:
        return None
    forward = step > 0
    lowest, highest = (sympy.Integer(0), size) if forward else (sympy.Integer(-1), size - 1)
    if not forward and end in _OPEN_ENDS:
        end = sympy.Integer(-_FAR)
    first, last = (_within(bound, size, lowest, highest, known) for bound in (start, end))
    if first is None or last is None:
        return None
    return as_dim(normal(largest(0, sympy.ceiling((last - first) / step)), known))


def _within(bound: Any, size: Any, lowest: Any, highest: Any, known: Known) -> sympy.Expr | None:
    """Returns a bound counted from 0 and clamped to the dim; None where its sign is not known."""
    names = {str(name) for name in bound.free_symbols}
    facts = facts_of(bound, known) if names <= set(known) else Facts(1, 0, None, None)
    if facts.low >= _FAR:
        return highest
    if facts.high <= -_FAR:
        return lowest
    if facts.low < 0 <= facts.high:
        return None
    counted = bound if facts.low >= 0 else bound + size
    within = smallest(counted, highest)
    return normal(largest(lowest, within), known)


def split(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Splits by the declared sizes, or into equal parts of which the last ones may be smaller."""
    data = node.inputs[0]
    assert data is not None
    if data.shape is None:
        rule(ctx, node)
        return
    axis = node.attributes.get_int("axis", 0) % len(data.shape)
    for out, size in zip(node.outputs, _split_sizes(ctx, node, data.shape[axis], known), strict=True):
        dims: list[Any] = list(data.shape.dims)
        dims[axis] = size
        _set(ctx, out, dims, data.dtype)


def _split_sizes(ctx: ShapeInferenceContext, node: ir.Node, dim: int | ir.SymbolicDim, known: Known) -> list[Any]:
    count = len(node.outputs)
    if "split" in node.attributes:
        return list(node.attributes["split"].as_ints())
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        entries = entries_of(ctx, node.inputs[1])
        if entries is None or entries.size != count:
            return [None] * count
        return [None if one is None else as_dim(normal(one, known)) for one in entries.ravel()]
    size = sympy.Integer(dim) if isinstance(dim, int) else read(str(dim.value))
    if size is None:
        return [None] * count
    part = sympy.ceiling(size / count) if "num_outputs" in node.attributes else size / count
    return [as_dim(normal(largest(0, smallest(part, size - k * part)), known)) for k in range(count)]


def pad(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Adds the padding before and after each padded axis."""
    data = node.inputs[0]
    assert data is not None
    if data.shape is None or "pads" in node.attributes or "paddings" in node.attributes:
        rule(ctx, node)
        return
    dims: list[Any] = list(data.shape.dims)
    added = entries_of(ctx, node.inputs[1])
    given = len(node.inputs) > 3 and node.inputs[3] is not None
    axes = integers_of(ctx, node.inputs[3]) if given else list(range(len(dims)))
    if axes is None or (added is not None and added.size != 2 * len(axes)):
        dims = [None] * len(dims)
        axes = []
    for k, axis in enumerate(axes):
        both = [None, None] if added is None else [added.ravel()[k], added.ravel()[k + len(axes)]]
        terms = [read(str(one.value)) if isinstance(one, ir.SymbolicDim) else one for one in (dims[axis], *both)]
        dims[axis] = None if any(one is None for one in terms) else as_dim(normal(sympy.Add(*terms), known))
    _set(ctx, node.outputs[0], dims, data.dtype)


def squeeze(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Without axes every dim of size 1 is removed; the result is known only if no dynamic dim can be 1."""
    data = node.inputs[0]
    assert data is not None
    has_axes = len(node.inputs) > 1 and node.inputs[1] is not None
    axes = integers_of(ctx, node.inputs[1]) if has_axes else None
    if "axes" in node.attributes or axes is not None:
        rule(ctx, node)
        return
    open_dims = [dim for dim in data.shape.dims if not isinstance(dim, int)] if data.shape is not None else []
    if has_axes or data.shape is None or any(_facts(dim, known).contains(1) for dim in open_dims):
        ctx.set_shape_and_dtype(node.outputs[0], None, data.dtype)
        return
    rule(ctx, node)


def _set(ctx: ShapeInferenceContext, out: ir.Value, dims: Sequence[Any], dtype: ir.DataType | None) -> None:
    out.shape = ir.Shape([ctx.new_symbolic_dim() if dim is None else dim for dim in dims])
    if dtype is not None:
        ctx.set_dtype(out, dtype)
