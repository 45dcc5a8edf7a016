"""Writes out a model's local maps: their meaning on a single device, in plain ONNX, the reference for every other execution.

Each coordinate of a local map's axes has its own nodes: its shards are parts of the inputs, a collective is plain ops on the values of
several coordinates, and the outputs are joined. Ranks do not run this form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.graph import INSIDE, is_inside, name_of
from partc.compiler.ops.families.control.local_map import (
    AXIS_INDEX,
    ENTER,
    LEAVE,
    axes_named,
    is_border,
    is_collective,
    specs,
)
from partc.compiler.ops.rule import OWN

Place = tuple[int, ...]


def unrolled(model: ir.Model, mesh: Mapping[str, int]) -> ir.Model:
    """Returns the model itself where it has no local maps; else a copy without any. `mesh` has the sizes of axes; any other axis has 1."""
    if not any(is_inside(node) for node in model.graph):
        return model
    model = model.clone()
    graph = model.graph
    maps: dict[str, list[ir.Node]] = {}
    for node in graph:
        if is_inside(node):
            maps.setdefault(node.metadata_props[INSIDE], []).append(node)
    for nodes in maps.values():
        axes = next(axes_named(node) for node in nodes if is_border(node))
        _Map(graph, {axis: mesh.get(axis, 1) for axis in axes}, name_of(nodes[0])).write_out(nodes)
    return model


@dataclass
class _Map:
    graph: ir.Graph
    sizes: Mapping[str, int]
    path: str
    copies: dict[tuple[ir.Value, Place], ir.Value] = field(default_factory=dict)
    nodes: list[ir.Node] = field(default_factory=list)
    results: dict[ir.Value, ir.Value] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)

    @property
    def places(self) -> list[Place]:
        return list(itertools.product(*(range(size) for size in self.sizes.values())))

    def write_out(self, nodes: Sequence[ir.Node]) -> None:
        for node in nodes:
            if node.domain == OWN and node.op_type == ENTER:
                self._enter(node)
            elif node.domain == OWN and node.op_type == LEAVE:
                self._leave(node)
            elif is_collective(node):
                self._collective(node)
            elif node.domain == OWN and node.op_type == AXIS_INDEX:
                at = list(self.sizes).index(axes_named(node)[0])
                for place in self.places:
                    self.copies[node.outputs[0], place] = self.constant(np.array(place[at], np.int64))
            else:
                self._node(node)
        first = nodes[0]
        self.graph.insert_before(first, self.nodes)
        for old, new in self.results.items():
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
            new.name, old.name = old.name, f"{old.name}.mapped"
        for node in reversed(nodes):
            self.graph.remove(node, safe=True)

    def add(self, op_type: str, inputs: Sequence[ir.Value], count: int = 1, **attributes: Any) -> list[ir.Value]:
        given = ir.convenience.convert_attributes(attributes)
        name = f"{self.path}.{op_type.lower()}{next(self.names)}"
        made = [ir.Value(name=f"{name}.{k}") for k in range(count)]
        self.nodes.append(ir.Node("", op_type, inputs, given, outputs=made, name=name))
        return made

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.add("Constant", [], value=ir.tensor(array))[0]

    def split(self, value: ir.Value, dim: int, count: int) -> list[ir.Value]:
        return [value] if count == 1 else self.add("Split", [value], count, axis=dim, num_outputs=count)

    def shards(self, value: ir.Value, dim: int, count: int, rank: int) -> list[ir.Value]:
        """Splits as `split` does, through a Reshape, so that the shards are known to be equal even where the dim's divisor is not known."""
        if count == 1:
            return [value]
        there = [*(k for k in range(rank) if k != dim), dim]
        (last,) = self.add("Transpose", [value], perm=there)
        shape = self.constant(np.array([0] * (rank - 1) + [count, -1], np.int64))
        (apart,) = self.add("Reshape", [last, shape])
        axis = self.constant(np.array([rank - 1], np.int64))
        parts = [self.add("Squeeze", [part, axis])[0] for part in self.split(apart, rank - 1, count)]
        return [self.add("Transpose", [part], perm=[there.index(k) for k in range(rank)])[0] for part in parts]

    def joined(self, values: Sequence[ir.Value], dim: int) -> ir.Value:
        return values[0] if len(values) == 1 else self.add("Concat", values, axis=dim)[0]

    def total(self, values: Sequence[ir.Value]) -> ir.Value:
        found = values[0]
        for value in values[1:]:
            (found,) = self.add("Add", [found, value])
        return found

    def zeros(self, value: ir.Value, like: ir.Value) -> ir.Value:
        (shape,) = self.add("Shape", [value])
        (zero,) = self.add("CastLike", [self.constant(np.zeros((), np.float32)), like])
        return self.add("Expand", [zero, shape])[0]

    def here(self, value: ir.Value, place: Place) -> ir.Value:
        return self.copies.get((value, place), value)

    def _enter(self, node: ir.Node) -> None:
        x = node.inputs[0]
        assert x is not None
        shards: dict[tuple[int, ...], ir.Value] = {(): x}
        counts = [math.prod(self.sizes[axis] for axis in dim) for dim in specs(node)]
        for dim, count in enumerate(counts):
            shards = {
                (*at, k): part
                for at, one in shards.items()
                for k, part in enumerate(self.shards(one, dim, count, len(counts)))
            }
        for place in self.places:
            (self.copies[node.outputs[0], place],) = self.add("Identity", [shards[self._shard(node, place)]])

    def _shard(self, node: ir.Node, place: Place) -> tuple[int, ...]:
        """Returns the shard's index along each dim, for a coordinate."""
        at = dict(zip(self.sizes, place, strict=True))
        numbers = []
        for axes in specs(node):
            number = 0
            for axis in axes:
                number = number * self.sizes[axis] + at[axis]
            numbers.append(number)
        return tuple(numbers)

    def _leave(self, node: ir.Node) -> None:
        y, out = node.inputs[0], node.outputs[0]
        assert y is not None
        parts: dict[tuple[int, ...], ir.Value] = {}
        for place in self.places:
            parts.setdefault(self._shard(node, place), self.here(y, place))
        for dim in reversed(range(len(specs(node)))):
            rows: dict[tuple[int, ...], list[ir.Value]] = {}
            for at in sorted(parts):
                rows.setdefault(at[:dim], []).append(parts[at])
            parts = {at: self.joined(row, dim) for at, row in rows.items()}
        (self.results[out],) = self.add("Identity", [parts[()]])

    def _node(self, node: ir.Node) -> None:
        for place in self.places:
            inputs = [None if value is None else self.here(value, place) for value in node.inputs]
            outputs = [
                ir.Value(name=f"{out.name}@{'.'.join(map(str, place))}" if out.name else "") for out in node.outputs
            ]
            name = f"{node.name}@{'.'.join(map(str, place))}"
            attributes = list(node.attributes.values())
            copy = ir.Node(
                node.domain, node.op_type, inputs, attributes, outputs=outputs, name=name, version=node.version
            )
            self.nodes.append(copy)
            self.copies.update({(out, place): one for out, one in zip(node.outputs, outputs, strict=True)})

    def _collective(self, node: ir.Node) -> None:
        x, out = node.inputs[0], node.outputs[0]
        assert x is not None
        at = list(self.sizes).index(axes_named(node)[0])
        sets: dict[Place, list[Place]] = {}
        for place in self.places:
            sets.setdefault((*place[:at], *place[at + 1 :]), []).append(place)
        for places in sets.values():
            results = self._together(node, [self.here(x, place) for place in places])
            for place, value in zip(places, results, strict=True):
                (self.copies[out, place],) = self.add("Identity", [value])

    def _together(self, node: ir.Node, values: list[ir.Value]) -> list[ir.Value]:
        """Returns the result of a collective for each coordinate along the axis, from their values."""
        said, count = node.attributes, len(values)
        dim, root = said.get_int("dim", 0), said.get_int("root", 0)
        to = said.get_int("to", dim)

        def at_root(value: ir.Value) -> list[ir.Value]:
            return [value if place == root else self.zeros(value, value) for place in range(count)]

        match node.op_type:
            case "AllReduce" if said.get_string("reduce", "sum") == "sum":
                return [self.total(values)] * count
            case "AllReduce":
                axis = self.constant(np.zeros(1, np.int64))
                rows = [self.add("Unsqueeze", [value, axis])[0] for value in values]
                op_type = "ReduceMax" if said.get_string("reduce", "") == "max" else "ReduceMin"
                return [self.add(op_type, [self.joined(rows, 0), axis], keepdims=0)[0]] * count
            case "AllGather":
                return [self.joined(values, dim)] * count
            case "ReduceScatter":
                return self.split(self.total(values), dim, count)
            case "AllToAll":
                parts = [self.split(value, dim, count) for value in values]
                return [self.joined([row[place] for row in parts], to) for place in range(count)]
            case "Broadcast":
                return [values[root]] * count
            case "Reduce":
                return at_root(self.total(values))
            case "Gather":
                return at_root(self.joined(values, dim))
            case "Scatter":
                return self.split(values[root], dim, count)
            case _:
                pairs = zip(said.get_ints("targets") or (), said.get_ints("sources") or (), strict=True)
                coming = dict(pairs)
                return [
                    values[coming[place]] if place in coming else self.zeros(values[place], values[place])
                    for place in range(count)
                ]
