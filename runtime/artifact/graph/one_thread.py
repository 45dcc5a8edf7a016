"""Nodes that are correct only on one thread: onnxruntime's ScatterND with a reduction.

Its threads divide the updates among them, and two threads may add to the same element at once, so that one addition is lost: for
instance in the gradient of a looked-up table, where an id occurs twice. Such a node has a session of its own, with one thread, so that
all other nodes keep their threads. When 16,384 rows of 64 elements are added to 100 rows, two threads lose additions in some of 100
runs, and take as long as one thread (onnxruntime 1.31).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from partc.runtime.artifact.graph.onnx_graph import graph_bodies, text_of

if TYPE_CHECKING:
    from onnx import FunctionProto, NodeProto

Key = tuple[str, str]


def in_one_thread(functions: Iterable[FunctionProto]) -> set[Key]:
    """Returns the domain and name of each function with a node that needs one thread; a function may call those before it."""
    found: set[Key] = set()
    for function in functions:
        if any(wants_one_thread(node, found) for node in function.node):
            found.add((function.domain, function.name))
    return found


def wants_one_thread(node: NodeProto, functions: Collection[Key]) -> bool:
    """Whether a node, a node of its bodies or the function that it calls (if in `functions`) is a ScatterND with a reduction."""
    if node.op_type == "ScatterND" and node.domain in ("", "ai.onnx"):
        return text_of(node, "reduction") not in ("", "none")
    if (node.domain, node.op_type) in functions:
        return True
    bodies = graph_bodies(node) if node.attribute else ()
    return bool(bodies) and any(wants_one_thread(inner, functions) for body in bodies for inner in body.node)
