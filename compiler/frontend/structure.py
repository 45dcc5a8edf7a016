"""The structure that every graph must have: each value defined once, weights with data, the attributes that ops require."""

from __future__ import annotations

from functools import cache

import onnx
import onnx_ir as ir
from partc.compiler.errors import Problem
from partc.compiler.ir.graph import bodies, nodes_of


def structure_problems(graph: ir.Graph, where: str, outer: frozenset[ir.Value] = frozenset()) -> list[Problem]:
    """Problems of values without a definition or with two, and of weights without data."""
    problems = []
    defined = set(outer) | set(graph.inputs) | set(graph.initializers.values())
    for value in graph.initializers.values():
        if value.const_value is None:
            problems.append(
                Problem(where, f"the weight '{value.name}' has no data", help="export the model with its weights")
            )
    nodes = list(graph)
    for node in nodes:
        defined.update(node.outputs)
    names: set[str] = set()
    for value in defined - outer:
        if value.name and value.name in names:
            problems.append(Problem(where, f"the value '{value.name}' is defined twice", help="export the model again"))
        names.add(value.name or "")
    for node in nodes:
        if not defined.issuperset(node.inputs):
            problems += [
                Problem(
                    where,
                    f"'{value.name}', read by {node.op_type} '{node.name}', is defined nowhere",
                    help="export the model again",
                )
                for value in node.inputs
                if value is not None and value not in defined
            ]
        for body in bodies(node):
            problems += structure_problems(body, where, frozenset(defined))
    problems += [
        Problem(where, f"the output '{value.name}' is defined nowhere", help="export the model again")
        for value in graph.outputs
        if value not in defined
    ]
    return problems


def missing_attributes(model: ir.Model, where: str) -> list[Problem]:
    """Problems of nodes without an attribute that their op requires; no runtime loads such a node."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    return [
        Problem(
            where,
            f"{node.op_type} '{node.name or node.outputs[0].name}' has no attribute '{name}', which it needs",
            help="export it again",
        )
        for node in nodes_of(model.graph)
        if node.domain in ("", "ai.onnx")
        for name in _required(node.op_type, opset)
        if name not in node.attributes
    ]


@cache
def _required(op_type: str, opset: int) -> tuple[str, ...]:
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return ()
    return tuple(name for name, attribute in sorted(schema.attributes.items()) if attribute.required)
