"""Rewrites a model whose shapes are known: new nodes and values get their paths, types and shapes as they are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.graph import add_initializer, name_of
from partc.compiler.ir.program import Typed
from partc.compiler.ir.value_info import Array, Dim, ValueInfo
from partc.runtime.spellings import first_free

T = TypeVar("T", bound=Typed)


class Rewriting(Generic[T]):
    """A program's graph during a rewrite, with its paths and values; `done` returns the new program."""

    def __init__(self, program: T) -> None:
        self.before = program
        self.graph = program.model.graph
        self.paths, self.values = dict(program.paths), dict(program.values)

    def done(self, **changed: Any) -> T:
        """Returns the program after all changes."""
        paths = {node: self.paths[node] for node in self.graph}
        return replace(self.before, paths=paths, values=self.values, **changed)

    def free(self, name: str) -> str:
        """Returns the name, made unique where the model has it already, and reserves it."""
        found = first_free(name, self._names.__contains__)
        self._names.add(found)
        return found

    @cached_property
    def _names(self) -> set[str]:
        return set(self.before.own_names)

    def like(self, value: ir.Value, name: str, sizes: Mapping[int, Dim] | None = None) -> ir.Value:
        """Returns a new value like `value`, except for the sizes of the dims in `sizes`."""
        info, shape = self.values[value], value.shape
        dims = None if shape is None else [(sizes or {}).get(k, dim) for k, dim in enumerate(shape.dims)]
        made = ir.Value(name=name, type=value.type, shape=None if dims is None else ir.Shape(dims))
        known = None if info.shape is None else tuple((sizes or {}).get(k, dim) for k, dim in enumerate(info.shape))
        self.values[made] = replace(info, shape=known)
        return made

    def turned(self, value: ir.Value, name: str, order: Sequence[int]) -> ir.Value:
        """Returns a new value like `value`, with its dims in this order."""
        info, shape = self.values[value], value.shape
        assert shape is not None
        made = ir.Value(name=name, type=value.type, shape=ir.Shape([shape[axis] for axis in order]))
        self.values[made] = replace(info, shape=None if info.shape is None else tuple(info.shape[k] for k in order))
        return made

    def constant(self, name: str, numbers: Array | Sequence[int] | int) -> ir.Value:
        """Adds a constant: an array, or an int64 vector or number."""
        array = numbers if isinstance(numbers, np.ndarray) else np.array(numbers, np.int64)
        value = add_initializer(self.graph, name, ir.Tensor(array, name=name))
        self.values[value] = ValueInfo(type_text(value.type), array.shape, array.itemsize)
        return value

    def vector(self, name: str, size: int) -> ir.Value:
        """Returns a new int64 vector, to be the output of a node."""
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([size]))
        self.values[value] = ValueInfo("tensor(int64)", (size,), 8)
        return value

    def put(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        suffix: str = "",
        attributes: Sequence[ir.Attr] = (),
        domain: str = "",
        **more: Any,
    ) -> ir.Node:
        """Inserts a new node before `before`, in the same module; its path is that node's path with the suffix."""
        extra = ir.convenience.convert_attributes(more)
        path = f"{self.paths[before]}{suffix}"
        node = ir.Node(domain, op_type, list(inputs), [*attributes, *extra], outputs=list(outputs), name=path)
        node.metadata_props.update(before.metadata_props)
        node.meta.update(before.meta)
        self.paths[node] = path
        self.graph.insert_before(before, node)
        return node

    def take_place(self, new: ir.Value, old: ir.Value, at: ir.Node) -> None:
        """Makes all readers of `old` read `new`; an output of the graph keeps its name by an Identity inserted before `at`."""
        if old.is_graph_output():
            leaving = self.like(old, name_of(old))
            self.put(at, "Identity", [new], [leaving], ".output")
            for k, output in enumerate(self.graph.outputs):
                if output is old:
                    self.graph.outputs[k] = leaving
        old.replace_all_uses_with(new)

    def drop(self, nodes: Sequence[ir.Node]) -> None:
        """Removes those of the nodes, listed in the graph's order, whose outputs are no longer read."""
        for node in reversed(nodes):
            if any(out.uses() or out.is_graph_output() for out in node.outputs):
                continue
            for out in node.outputs:
                self.values.pop(out, None)
            del self.paths[node]
            self.graph.remove(node, safe=True)
