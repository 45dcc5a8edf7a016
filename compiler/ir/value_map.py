"""Builds nodes out of ops over values of the job: maps each value of a node to its value in the job, whatever the two are called.

w, dw, lr = (values.of(one) for one in (weight, gradient, rate)) values.ops([update_node(w, dw, lr)])
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
from partc.compiler.ir.programs import Compute, Value


class ValueMap(dict[ir.Value, Value]):
    """Maps each input and output value of nodes to its value in the job."""

    def of(self, value: Value, kind: ir.TypeProtocol | None = None, shape: ir.Shape | None = None) -> ir.Value:
        """Returns a new value that represents `value` of the job and has its name."""
        found = ir.Value(name=str(value), type=kind, shape=shape)
        self[found] = value
        return found

    def ops(self, nodes: Iterable[ir.Node]) -> list[Compute]:
        """Returns the nodes over the values of the job; a node named like its output is labelled with that output's value in the job."""
        computes = []
        for node in nodes:
            inputs = tuple([None if one is None else self[one] for one in node.inputs])
            outputs = tuple([self[one] if one.name else None for one in node.outputs])
            label = next((self[one] for one in node.outputs if one.name and one.name == node.name), node.name or "")
            computes.append(Compute(node, node, inputs, outputs, label=label))
        return computes
