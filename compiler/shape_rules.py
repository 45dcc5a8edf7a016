"""Shape rules that partc adds to onnx-shape-inference, and its engine made tolerant of a rule that fails on one node.

A wrong shape is worse than none: a receive is posted with the size that the shape promises. So rules known to be wrong are
replaced here, and a rule that raises leaves its node's outputs unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import onnx_ir as ir
import sympy
from onnx_shape_inference import SYM_DATA_KEY, ShapeInferenceContext, registry
from partc.compiler.dims.facts import Facts, facts_of
from partc.compiler.dims.normal import as_dim, normal, normal_dim, quotient
from partc.compiler.dims.reading import read

Rule = Callable[[ShapeInferenceContext, ir.Node], None]
Known = Mapping[str, Facts]
"""What is promised of the dims that the inputs name."""


def _unknown_sizes(ctx: ShapeInferenceContext, node: ir.Node, axis: int) -> None:
    """Every output has the input's rank and dims, but a size along `axis` that only a run tells."""
    data = node.inputs[0]
    assert data is not None
    for out in node.outputs:
        if data.shape is None:
            ctx.set_shape_and_dtype(out, None, data.dtype)
            continue
        dims = list(data.shape.dims)
        dims[axis] = ctx.new_symbolic_dim()
        ctx.set_shape_and_dtype(out, ir.Shape(dims), data.dtype)


def split(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """Sizes given by a value that is no constant are unknown; the engine takes equal parts."""
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    if sizes is None or ir.convenience.get_const_tensor(sizes) is not None:
        rule(ctx, node)
    else:
        _unknown_sizes(ctx, node, node.attributes.get_int("axis", 0))


def squeeze(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """Axes given by a value that is no constant leave the rank open; the engine drops every dim of size 1."""
    data, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None or ir.convenience.get_const_tensor(axes) is not None:
        rule(ctx, node)
    elif data is not None:
        ctx.set_shape_and_dtype(node.outputs[0], None, data.dtype)


def unique(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """With an axis, the first output has the input's rank; the engine says 1. Index outputs are 1-D."""
    axis = node.attributes.get_int("axis", None)
    data = node.inputs[0]
    if axis is None or data is None:
        rule(ctx, node)
        return
    for k, out in enumerate(node.outputs):
        if k == 0:
            dims = None if data.shape is None else list(data.shape.dims)
            if dims is not None:
                dims[axis] = ctx.new_symbolic_dim()
            ctx.set_shape_and_dtype(out, None if dims is None else ir.Shape(dims), data.dtype)
        else:
            ctx.set_shape_and_dtype(out, ir.Shape([ctx.new_symbolic_dim()]), ir.DataType.INT64)


def if_(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """Where one branch's shape is unknown, so is the result's; the engine takes the other's."""
    rule(ctx, node)
    branches = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
    for k, out in enumerate(node.outputs):
        if any(branch.outputs[k].shape is None for branch in branches):
            out.shape = None


def loop(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """A carried value keeps its shape only if the body gives back the shape that it began with; the engine takes the body's."""
    rule(ctx, node)
    body = node.attributes["body"].as_graph()
    for out, first, last in zip(node.outputs, node.inputs[2:], body.outputs[1:], strict=False):
        if first is None or first.shape is None or first.shape != last.shape:
            out.shape = None


def slice_(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """A fixed end of a dynamic dim may lie beyond it: `x[:5]` has 5 only if the dim is proven to be at least 5; the engine says 5."""
    rule(ctx, node)
    data, out = node.inputs[0], node.outputs[0]
    starts, ends = _ints(node, 1, "starts"), _ints(node, 2, "ends")
    if data is None or data.shape is None or out.shape is None or starts is None or ends is None:
        return
    axes = _ints(node, 3, "axes") or list(range(len(starts)))
    dims = list(out.shape.dims)
    for axis, start, end in zip(axes, starts, ends, strict=True):
        whole = data.shape[axis]
        if isinstance(whole, int) or end in _FAR or not isinstance(dims[axis], int):
            continue
        least = facts_of(whole, known).min or 0
        if not 0 <= max(start, end) <= least:
            dims[axis] = ctx.new_symbolic_dim()
    out.shape = ir.Shape(dims)


def broadcast(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """Of two different dynamic dims either may be 1; only one that is proven to be larger is the result's. The engine takes the first."""
    rule(ctx, node)
    out = node.outputs[0]
    if out.shape is None:
        return
    dims = list(out.shape.dims)
    for place in range(3 if node.op_type == "MatMul" else 1, len(dims) + 1):
        there = [
            v.shape[-place] for v in node.inputs if v is not None and v.shape is not None and len(v.shape) >= place
        ]
        open_dims = list(dict.fromkeys(dim for dim in there if isinstance(dim, ir.SymbolicDim)))
        if len(open_dims) < 2 or any(isinstance(dim, int) and dim != 1 for dim in there):
            continue
        larger = [dim for dim in open_dims if (facts_of(dim, known).min or 0) >= 2]
        dims[-place] = larger[0] if larger else ctx.new_symbolic_dim()
    out.shape = ir.Shape(dims)


def reshape(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule, known: Known) -> None:
    """An entry of -1 is the exact quotient, for other sizes are refused where the node runs; the engine rounds it down."""
    rule(ctx, node)
    data, target, out = node.inputs[0], node.inputs[1], node.outputs[0]
    entries = None if target is None else ctx.get_symbolic_value(target)
    if data is None or data.shape is None or out.shape is None or entries is None or entries.count(-1) != 1:
        return
    place = entries.index(-1)
    dims = list(out.shape.dims)
    total, others = _product(data.shape.dims), _product(dims[:place] + dims[place + 1 :])
    if total is not None and others:
        dims[place] = as_dim(normal(quotient(total, others), known))
        out.shape = ir.Shape(dims)


def _product(dims: Iterable[int | ir.SymbolicDim]) -> sympy.Expr | None:
    """The product of dims; None where one is unreadable."""
    found = [sympy.Integer(dim) if isinstance(dim, int) else read(str(dim.value)) for dim in dims]
    return None if any(one is None for one in found) else sympy.expand(sympy.Mul(*found))


def _normalize_outputs(ctx: ShapeInferenceContext, node: ir.Node, known: Known) -> None:
    """Brings what a rule found into normal form, so that later nodes see equal dims as equal and numbers as numbers."""
    for out in node.outputs:
        if out.shape is not None:
            dims = [normal_dim(dim, known) for dim in out.shape.dims]
            if any(a is not b for a, b in zip(dims, out.shape.dims, strict=True)):
                out.shape = ir.Shape(dims)
        if SYM_DATA_KEY in out.metadata_props:
            values = ctx.get_symbolic_value(out)
            if values is not None:
                ctx.set_symbolic_value(out, [normal_dim(value, known) for value in values])


def _ints(node: ir.Node, k: int, name: str) -> list[int] | None:
    """A list of integers that is an attribute, or a constant input; None where it is neither."""
    if name in node.attributes:
        return list(node.attributes[name].as_ints())
    value = node.inputs[k] if k < len(node.inputs) else None
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


_FAR = {2**63 - 1, 2**31 - 1, -(2**63), -(2**31)}
BROADCASTING = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Where", "PRelu"),
        *("And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"),
        *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    }
)
"""Ops of ai.onnx whose output is as large as its inputs broadcast."""

CORRECTIONS: dict[tuple[str, str], Callable[[ShapeInferenceContext, ir.Node, Rule, Known], None]] = {
    **{("", op): broadcast for op in sorted(BROADCASTING | {"MatMul"})},
    ("", "If"): if_,
    ("", "Loop"): loop,
    ("", "Reshape"): reshape,
    ("", "Slice"): slice_,
    ("", "Split"): split,
    ("", "Squeeze"): squeeze,
    ("", "Unique"): unique,
}


@contextmanager
def tolerant_rules(failed: list[ir.Node], known: Known) -> Iterator[None]:
    """Within, the engine's rules are corrected, and a node whose rule raises is appended to `failed` and left unknown.

    The engine looks rules up through `registry.get` and has no hook for either; so the registry's lookup is wrapped here.
    """
    lookup = registry.get

    def get(domain: str, op_type: str, version: int = 1) -> Rule | None:
        rule = lookup(domain, op_type, version=version)
        if rule is None:
            return None
        correction = CORRECTIONS.get((domain, op_type))

        def guarded(ctx: ShapeInferenceContext, node: ir.Node) -> None:
            try:
                if correction:
                    correction(ctx, node, rule, known)
                else:
                    rule(ctx, node)
                _normalize_outputs(ctx, node, known)
            except Exception:
                failed.append(node)

        return guarded

    registry.get = get
    try:
        yield
    finally:
        del registry.get
