"""Shape rules of If, Loop and Scan: the outputs of their bodies, as far as they are the same for any number of iterations.

A carried value has the shape that it begins with, if the body gives back that shape. What a body changes is unknown in it, and
the body is read again with that, until nothing changes. A scanned output of a Loop has as many rows as trips only if nothing ends
the loop early: its condition is absent or true, and the body hands on the condition or gives true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import sympy
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.analysis.shape_data import scalar_of
from partc.compiler.dims.extremes import largest
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import as_dim, normal

Known = Mapping[str, Facts]


def if_(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Sets the outputs to those of the branch that runs, where the condition is known; else to the common part of both branches."""
    branches = {name: node.attributes[name].as_graph() for name in ("then_branch", "else_branch")}
    condition = scalar_of(ctx, node.inputs[0])
    if isinstance(condition, sympy.Integer):
        runs = branches["then_branch" if condition else "else_branch"]
        for out, inner in zip(node.outputs, runs.outputs, strict=False):
            out.shape = inner.shape
            out.type = inner.type or out.type
        return
    rule(ctx, node)
    for k, out in enumerate(node.outputs):
        if any(branch.outputs[k].shape is None for branch in branches.values()):
            out.shape = None


def loop(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """Carried values keep their initial shape if the body preserves it; scanned outputs have a row for each trip."""
    body = node.attributes["body"].as_graph()
    first = list(node.inputs[2:])
    inside, given = body.inputs[2:], body.outputs[1:]
    settle(ctx, body, first, inside, given[: len(first)])
    trips = _trips(ctx, node, body, known)
    for k, (out, last) in enumerate(zip(node.outputs, given, strict=False)):
        if k < len(first):
            out.type = out.type or last.type or inside[k].type
            out.shape = inside[k].shape
        else:
            out.type = out.type or last.type
            out.shape = (
                None
                if last.shape is None
                else ir.Shape([ctx.new_symbolic_dim() if trips is None else trips, *last.shape.dims])
            )


def settle(
    ctx: ShapeInferenceContext, body: ir.Graph, first: list[ir.Value | None], inside: Any, last_values: Any
) -> None:
    """Sets shapes of a body's carried inputs that hold in every iteration: the initial ones, with dims unknown that the body changes."""
    for start, value in zip(first, inside, strict=False):
        if start is not None:
            value.type = value.type or start.type
            value.shape = start.shape
    for _ in range(sum(1 + len(value.shape or ()) for value in inside) + 1):
        _read_again(ctx, body)
        changed = False
        for value, last in zip(inside, last_values, strict=False):
            common = _common(ctx, value.shape, last.shape)
            if common is not value.shape:
                value.shape, changed = common, True
        if not changed:
            return


def _common(ctx: ShapeInferenceContext, first: ir.Shape | None, last: ir.Shape | None) -> ir.Shape | None:
    """Returns the shape that two shapes have in common; `first` itself if it covers both."""
    if first is None or last is None or len(first) != len(last):
        return None
    if all(a == b or _is_new(ctx, a) for a, b in zip(first.dims, last.dims, strict=True)):
        return first
    return ir.Shape([a if a == b else ctx.new_symbolic_dim() for a, b in zip(first.dims, last.dims, strict=True)])


def _is_new(ctx: ShapeInferenceContext, dim: int | ir.SymbolicDim) -> bool:
    """Whether the dim is unknown already."""
    return isinstance(dim, ir.SymbolicDim) and (dim.value is None or ctx.is_generated_symbol(dim.value))


def _read_again(ctx: ShapeInferenceContext, body: ir.Graph) -> None:
    from onnx_shape_inference import _engine

    for node in body:
        for out in node.outputs:
            out.shape = None
    _engine._process_graph(ctx, body, warn_on_missing=False)


def _trips(ctx: ShapeInferenceContext, node: ir.Node, body: ir.Graph, known: Known) -> int | ir.SymbolicDim | None:
    """Returns the number of iterations; None where the loop may end early."""
    count = scalar_of(ctx, node.inputs[0])
    begins = node.inputs[1] is None or scalar_of(ctx, node.inputs[1]) == 1
    goes_on = body.outputs[0]
    while (maker := goes_on.producer()) is not None and maker.op_type == "Identity" and maker.inputs[0] is not None:
        goes_on = maker.inputs[0]
    if count is None or not begins or not (goes_on is body.inputs[1] or scalar_of(ctx, goes_on) == 1):
        return None
    return as_dim(normal(largest(0, count), known))


def scan(ctx: ShapeInferenceContext, node: ir.Node, rule: Any, known: Known) -> None:
    """States keep their initial shape if the body preserves it."""
    body = node.attributes["body"].as_graph()
    carried = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
    settle(ctx, body, list(node.inputs[:carried]), body.inputs[:carried], body.outputs[:carried])
    rule(ctx, node)
    for out, value in zip(node.outputs[:carried], body.inputs, strict=False):
        out.shape = value.shape
