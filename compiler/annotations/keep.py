"""Annotations through a rewrite of the graph that gives nodes other operands: specs are bound to values, and would be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem


@dataclass(frozen=True)
class _Held:
    """A node's annotation before the rewrite, and per entry and spec the place of its operand, None where it has none."""

    node: ir.Node
    entries: tuple[ir.NodeDeviceConfiguration, ...]
    places: tuple[tuple[tuple[bool, int] | None, ...], ...]


@contextmanager
def kept(model: ir.Model, where: str) -> Iterator[None]:
    """Afterwards every spec of a node of the model speaks of the same operand as before, whichever value that is now.

    Raises CompileError for annotated nodes that are gone then: calls of functions, whose nodes run on their own.
    """
    held = [_held(node) for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.device_configurations]
    yield
    problems = []
    for one in held:
        if one.node.graph is None:
            fact = f"'{one.node.name}' calls the function {one.node.op_type} and is annotated"
            law = "functions are inlined: their nodes are placed and cut, calls are not"
            problems.append(Problem(where, fact, law, "annotate the nodes inside of the function"))
            continue
        one.node.device_configurations = tuple(
            replace(
                entry,
                sharding_specs=tuple(
                    _again(one.node, spec, at) for spec, at in zip(entry.sharding_specs, places, strict=True)
                ),
            )
            for entry, places in zip(one.entries, one.places, strict=True)
        )
    if problems:
        raise CompileError(problems)


def _held(node: ir.Node) -> _Held:
    entries = node.device_configurations
    places = tuple(tuple(_place(node, spec.value) for spec in entry.sharding_specs) for entry in entries)
    return _Held(node, entries, places)


def _place(node: ir.Node, value: ir.Value | None) -> tuple[bool, int] | None:
    """Whether the value is an input, and which operand it is."""
    for is_input, values in ((True, node.inputs), (False, node.outputs)):
        for k, operand in enumerate(values):
            if operand is not None and operand is value:
                return is_input, k
    return None


def _again(node: ir.Node, spec: ir.ShardingSpec, place: tuple[bool, int] | None) -> ir.ShardingSpec:
    if place is None:
        return spec
    is_input, k = place
    return replace(spec, value=(node.inputs if is_input else node.outputs)[k])
