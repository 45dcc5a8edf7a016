"""Inlines calls of model-local functions. Each call counts as a module: the nodes from inside keep the call's name.

onnx-ir's inliner copies a call's metadata to the nodes that replace the call. So every call is marked with its name, under a key for its
depth: a call within a function has a larger depth than every call of that function. After inlining, the marks become two entries of
`ir.Node.meta`, which exists in memory only: the names of the calls around the node, outermost first, and the node's name in its function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass
from partc.compiler.ir.graph import OWN_NAME
from partc.runtime.artifact.graph.onnx_graph import all_nodes

CALLS = "partc.calls"
"""Key of `ir.Node.meta`: the names of the calls that a node comes from."""

_MARK, _NAME = "partc.call.", "partc.name"


class Extent(NamedTuple):
    """The size of a function or model with its calls inlined: the number of nodes, and the depth to which calls nest."""

    nodes: int
    depth: int


def extent_of(model: onnx.ModelProto) -> Extent:
    """Returns the extent of a model after inlining, counted without inlining it.

    Each function's extent is computed once, so the time is linear in the file's nodes. Raises ValueError where a function calls itself.
    """
    functions = {(one.domain, one.name, one.overload): list(all_nodes(one.node)) for one in model.functions}
    extents: dict[ir.OperatorIdentifier, Extent] = {}

    def extent(nodes: Iterable[onnx.NodeProto]) -> Extent:
        count = depth = 0
        for node in nodes:
            inside = extents.get((node.domain, node.op_type, node.overload))
            count += 1 + (inside.nodes if inside else 0)
            depth = max(depth, 1 + inside.depth if inside else 0)
        return Extent(count, depth)

    waiting = [(name, False) for name in functions]
    begun = set[ir.OperatorIdentifier]()
    while waiting:
        name, is_last = waiting.pop()
        if is_last:
            extents[name] = extent(functions[name])
        elif name not in extents:
            if name in begun:
                raise ValueError(f"the function '{name[1]}' of '{name[0]}' calls itself")
            begun.add(name)
            called = dict.fromkeys((node.domain, node.op_type, node.overload) for node in functions[name])
            waiting += [(name, True), *((one, False) for one in called if one in functions and one not in extents)]
    return extent(all_nodes(model.graph.node))


def inline_calls(model: ir.Model) -> ir.Model:
    """Returns `model` with all calls of its own functions inlined. Raises where calls recurse or need another opset than the model's."""
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
    """Marks each call among the nodes with its name; an unnamed call is named by its function, as unnamed nodes are by their op."""
    unnamed: dict[str, int] = {}
    for node in nodes:
        if node.op_identifier() in model.functions:
            name = node.name
            if not name:
                k = unnamed[node.op_type] = unnamed.get(node.op_type, -1) + 1
                name = f"{node.op_type}_{k}"
            node.metadata_props[f"{_MARK}{depth:06d}"] = name


def _depths(model: ir.Model) -> dict[ir.OperatorIdentifier, int]:
    """Maps each function to its depth: one more than the depth of the deepest function that calls it. The inliner refuses cycles."""
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
