"""Preserves annotations while a rewrite gives nodes other operands: sharding specs are bound to values, and would be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.frontend import annotation_keys as keys


@dataclass(frozen=True)
class _Annotation:
    """A node's annotation before a rewrite. `places`: for each entry and spec, the operand's position (is an input, index), or None."""

    node: ir.Node
    entries: tuple[ir.NodeDeviceConfiguration, ...]
    places: tuple[tuple[tuple[bool, int] | None, ...], ...]


@contextmanager
def preserving_operands(model: ir.Model, where: str) -> Iterator[None]:
    """On exit, rebinds every sharding spec to the operand at the same index as before, whichever value that is then.

    Raises CompileError for annotated nodes that no longer exist: calls of functions, whose inlined nodes run instead.
    """
    annotations = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if entries := node.device_configurations:
            places = tuple(tuple(_place(node, spec.value) for spec in entry.sharding_specs) for entry in entries)
            annotations.append(_Annotation(node, entries, places))
    yield
    problems = []
    for annotation in annotations:
        if annotation.node.graph is None:
            fact = f"'{annotation.node.name}' calls the function {annotation.node.op_type} and is annotated"
            law = "functions are inlined: their nodes are placed and sharded, calls are not"
            problems.append(Problem(where, fact, law, "annotate the nodes inside of the function"))
            continue
        annotation.node.device_configurations = tuple(
            replace(
                entry,
                sharding_specs=tuple(
                    spec
                    if at is None
                    else replace(spec, value=(annotation.node.inputs if at[0] else annotation.node.outputs)[at[1]])
                    for spec, at in zip(entry.sharding_specs, places, strict=True)
                ),
            )
            for entry, places in zip(annotation.entries, annotation.places, strict=True)
        )
    if problems:
        raise CompileError(problems)


@contextmanager
def preserving_by_output(model: ir.Model) -> Iterator[None]:
    """On exit, copies name, metadata and annotations to the nodes that a converter replaced by new ones.

    A new node is matched with an old one by the first output, and where the converter has renamed that output, by the first input. A node
    whose op type changed gets no annotations, since they describe the old op's operands.
    """
    declared, metadata = model.device_configurations, dict(model.metadata_props)
    nodes, names = {node.outputs[0].name: node for node in model.graph}, {node.name for node in model.graph}
    ports = {value.name: _own(value) for value in (*model.graph.inputs, *model.graph.outputs) if _own(value)}
    yield
    model.device_configurations = declared
    model.metadata_props.update(metadata)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.update(ports.get(value.name, {}))
    kept = {node.name for node in model.graph}
    lost = [node for node in nodes.values() if node.name not in kept and _first(node)]
    called: dict[str | None, str | None] = {}
    for node in model.graph:
        old = nodes.get(node.outputs[0].name)
        if old is None and node.name not in names and (first := _first(node)):
            old = next((one for one in lost if _first(one) == called.get(first, first)), None)
            called |= {node.outputs[0].name: old.outputs[0].name} if old is not None else {}
        if old is None or old is node:
            continue
        lost = [one for one in lost if one is not old]
        node.name = old.name
        scopes = old.metadata_props.items() - _own(old).items()
        node.metadata_props.update(sorted(scopes))
        if old.op_type != node.op_type:
            continue
        operands = {value.name: value for value in (*node.inputs, *node.outputs) if value is not None}
        node.metadata_props.update(_own(old))
        node.device_configurations = tuple(
            replace(
                entry,
                sharding_specs=tuple(
                    replace(spec, value=operands.get(spec.value.name, spec.value) if spec.value is not None else None)
                    for spec in entry.sharding_specs
                ),
            )
            for entry in old.device_configurations
        )


def _first(node: ir.Node) -> str:
    """Returns the name of the first input, or '' where there is none."""
    return str(node.inputs[0].name or "") if node.inputs and node.inputs[0] is not None else ""


def _own(of: ir.Node | ir.Value) -> dict[str, str]:
    return {key: text for key, text in of.metadata_props.items() if key.startswith(keys.PREFIX)}


def _place(node: ir.Node, value: ir.Value | None) -> tuple[bool, int] | None:
    """Returns whether the value is an input of the node, and its index; None where it is not an operand."""
    for is_input, values in ((True, node.inputs), (False, node.outputs)):
        for k, operand in enumerate(values):
            if operand is not None and operand is value:
                return is_input, k
    return None
