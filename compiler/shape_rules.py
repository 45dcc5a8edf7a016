"""Shape rules that partc adds to onnx-shape-inference, and its engine made tolerant of a rule that fails on one node.

A wrong shape is worse than none: a receive is posted with the size that the shape promises. So rules known to be wrong are
replaced here, and a rule that raises leaves its node's outputs unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

Rule = Callable[[ShapeInferenceContext, ir.Node], None]


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


def split(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule) -> None:
    """Sizes given by a value that is no constant are unknown; the engine takes equal parts."""
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    if sizes is None or ir.convenience.get_const_tensor(sizes) is not None:
        rule(ctx, node)
    else:
        _unknown_sizes(ctx, node, node.attributes.get_int("axis", 0))


def squeeze(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule) -> None:
    """Axes given by a value that is no constant leave the rank open; the engine drops every dim of size 1."""
    data, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None or ir.convenience.get_const_tensor(axes) is not None:
        rule(ctx, node)
    elif data is not None:
        ctx.set_shape_and_dtype(node.outputs[0], None, data.dtype)


def unique(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule) -> None:
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


def if_(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule) -> None:
    """Where one branch's shape is unknown, so is the result's; the engine takes the other's."""
    rule(ctx, node)
    branches = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
    for k, out in enumerate(node.outputs):
        if any(branch.outputs[k].shape is None for branch in branches):
            out.shape = None


def loop(ctx: ShapeInferenceContext, node: ir.Node, rule: Rule) -> None:
    """A carried value keeps its shape only if the body gives back the shape that it began with; the engine takes the body's."""
    rule(ctx, node)
    body = node.attributes["body"].as_graph()
    for out, first, last in zip(node.outputs, node.inputs[2:], body.outputs[1:], strict=False):
        if first is None or first.shape is None or first.shape != last.shape:
            out.shape = None


CORRECTIONS: dict[tuple[str, str], Callable[[ShapeInferenceContext, ir.Node, Rule], None]] = {
    ("", "If"): if_,
    ("", "Loop"): loop,
    ("", "Split"): split,
    ("", "Squeeze"): squeeze,
    ("", "Unique"): unique,
}


@contextmanager
def tolerant_rules(failed: list[ir.Node]) -> Iterator[None]:
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
                    correction(ctx, node, rule)
                else:
                    rule(ctx, node)
            except Exception:
                failed.append(node)

        return guarded

    registry.get = get
    try:
        yield
    finally:
        del registry.get
