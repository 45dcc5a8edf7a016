"""Calls of model-local functions, written out. A call is a module: what was inside keeps the call's name.

A node's metadata goes to what a call of it becomes, so every call is marked with its name, under a key for the depth at which it
stands: a call within a function lies deeper than every call of that function. Afterwards the marks become two entries of
`ir.Node.meta`, which lives in memory only: the names of the calls around the node, outermost first, and its own name in the function.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass
from partc.compiler.ir.graph import OWN_NAME

CALLS = "partc.calls"
"""Key of `ir.Node.meta`: the names of the calls that a node comes from."""

_MARK, _NAME = "partc.call.", "partc.name"


def inline_calls(model: ir.Model) -> ir.Model:
    """`model` without calls of its own functions. Raises where calls are recursive or ask for another opset than the model's."""
    depths = _depths(model)
    for nodes, depth in [(_nodes(model.graph), 0), *((_nodes(f), depths.get(key, 0)) for key, f in _functions(model))]:
        _mark(model, list(nodes), depth)
    for _, function in _functions(model):
        for node in _nodes(function):
            node.metadata_props[_NAME] = node.name or ""
    model = InlinePass()(model).model
    for node in _nodes(model.graph):
        marks = sorted(key for key in node.metadata_props if key.startswith(_MARK))
        calls = tuple(node.metadata_props.pop(key) for key in marks)
        name = node.metadata_props.pop(_NAME, None)
        if calls:
            node.meta[CALLS], node.meta[OWN_NAME] = calls, name or ""
    return model


def _functions(model: ir.Model) -> list[tuple[ir.OperatorIdentifier, ir.Function]]:
    return list(model.functions.items())


def _nodes(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    return iter(ir.traversal.RecursiveGraphIterator(graph))


def _mark(model: ir.Model, nodes: list[ir.Node], depth: int) -> None:
    """Names the calls among the nodes; unnamed ones by their function, as unnamed nodes are by their op."""
    unnamed: dict[str, int] = {}
    for node in nodes:
        if node.op_identifier() in model.functions:
            name = node.name
            if not name:
                k = unnamed[node.op_type] = unnamed.get(node.op_type, -1) + 1
                name = f"{node.op_type}_{k}"
            node.metadata_props[f"{_MARK}{depth:06d}"] = name


def _depths(model: ir.Model) -> dict[ir.OperatorIdentifier, int]:
    """Maps each function to its depth of calls, one more than the deepest function that it calls. Cycles are left to the inliner."""
    depths = {key: 1 for key, _ in _functions(model)}
    for _ in depths:
        changed = False
        for key, function in _functions(model):
            for node in _nodes(function):
                inner = node.op_identifier()
                if inner in depths and depths[inner] <= depths[key]:
                    depths[inner] = depths[key] + 1
                    changed = True
        if not changed:
            break
    return depths
