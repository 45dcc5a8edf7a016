"""The scope into which a gradient's nodes are emitted: values by name with their types and shapes, each inferred when its node is emitted.

Values of the forward program come in as copies, so that nothing here touches its graph; the nodes that go out name them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry
from partc.compiler.analysis.shape_extents import BROADCASTING
from partc.compiler.analysis.shape_rules import tolerant_rules
from partc.compiler.dims.facts import Facts
from partc.compiler.dims.normal import normal_dim
from partc.compiler.ir.graph import operand_name
from partc.compiler.ir.value_info import Shape
from partc.compiler.ops.node import same
from partc.runtime.spellings import first_free

OPSETS = {"": 21, "com.microsoft": 1}
_SIZED_BY_A_VALUE = {"Split": 1, "Squeeze": 1}
_WITH_BODIES = ("If", "Loop", "Scan")
"""What is in these was inferred as it was made; corrected rules would do it again, and values around a body have only names there."""


@dataclass
class Scope:
    """Values known by name, the nodes emitted for the backward pass, those that go with the forward pass, and constants.

    `early` nodes read primals and are run where these are made: the `Shape` of a primal, kept in its place. `reserved`: names of other
    values, which nothing new gets. `known`: what is promised of symbols; with it the extent of a half, `floor(batch/2)`, is `batch/2`.
    """

    values: dict[str, ir.Value] = field(default_factory=dict)
    nodes: list[ir.Node] = field(default_factory=list)
    early: list[ir.Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    reserved: Collection[str] = frozenset()
    known: Mapping[str, Facts] = field(default_factory=dict)
    _context: ShapeInferenceContext = field(default_factory=lambda: ShapeInferenceContext(OPSETS))

    def know(
        self,
        values: Iterable[ir.Value],
        shapes: Mapping[str, Shape | None] | None = None,
        constants: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Takes in values of the forward program; `shapes` are those of the shards, where these differ."""
        for value in values:
            name = operand_name(value)
            if name in self.values or not name:
                continue
            shape = (shapes or {}).get(name)
            copied = value.shape if shape is None else ir.Shape(shape)
            copied = copied and ir.Shape([normal_dim(dim, self.known) for dim in copied.dims])
            tensor = ir.convenience.get_const_tensor(value)
            copy = ir.Value(name=name, type=value.type, const_value=tensor)
            if copied is not None:
                named = [dim for dim in copied.dims if isinstance(dim, ir.SymbolicDim)]
                self._context.reserve_symbol_names(sorted({one for dim in named for one in dim.free_symbols()}))
                if all(dim.value is not None for dim in named):
                    copy.shape = ir.Shape(copied.dims)
                else:
                    copy.shape = self._context.name_anonymous_dims_in_shape(ir.Shape(copied.dims))
            self.values[name] = copy
        for name, array in (constants or {}).items():
            if name not in self.values:
                self.values[name] = _constant(name, array)

    def derived(self, name: str) -> str:
        """The name, with strokes where another value has it."""
        return first_free(name, self.reserved.__contains__)

    def value(self, name: str) -> ir.Value:
        """The value of a name; one of which nothing is known where the name is new."""
        return self.values.setdefault(name, ir.Value(name=name))

    def constant(self, name: str, array: np.ndarray) -> str:
        """A constant of the backward pass; the same name is the same constant."""
        if name not in self.constants:
            self.constants[name] = array
            self.values[name] = _constant(name, array)
        return name

    def add(self, node: ir.Node, *, early: bool = False) -> None:
        """Takes a node in, and infers what it makes."""
        for out in node.outputs:
            self.values[operand_name(out)] = out
        self.infer(node)
        (self.early if early else self.nodes).append(node)

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Sequence[ir.Attr] = (),
        domain: str = "",
    ) -> ir.Node:
        """A node over this scope's values."""
        operands = [self.value(name) if name else None for name in inputs]
        made = [ir.Value(name=name) for name in outputs]
        return ir.Node(domain, op_type, operands, attributes, outputs=made, name=outputs[0])

    def infer(self, node: ir.Node) -> None:
        """Fills in the types and shapes of a node's outputs, as far as they can be told."""
        sizes = _SIZED_BY_A_VALUE.get(node.op_type)
        given = node.inputs[sizes] if sizes is not None and sizes < len(node.inputs) else None
        registry.collect()
        with contextlib.nullcontext() if node.op_type in _WITH_BODIES else tolerant_rules(self.known):
            rule = registry.get(node.domain, node.op_type, OPSETS.get(node.domain, 1))
        if rule is not None and (given is None or given.const_value is not None):
            with contextlib.suppress(Exception):
                rule(self._context, node)
        for out in node.outputs:
            if out.shape is not None:
                out.shape = ir.Shape([normal_dim(dim, self.known) for dim in out.shape.dims])
        if self.is_doubtful(node):
            self._unsure(node)
        for out in node.outputs:
            if out.dtype is None and node.inputs and node.inputs[0] is not None:
                out.type = node.inputs[0].type
            if out.shape is not None and any(
                isinstance(dim, ir.SymbolicDim) and dim.value is None for dim in out.shape.dims
            ):
                out.shape = self._context.name_anonymous_dims_in_shape(out.shape)

    def is_doubtful(self, node: ir.Node) -> bool:
        """Whether the node broadcasts dims of which it is not certain which one is the larger."""
        return (node.op_type in BROADCASTING or node.op_type == "BiasGelu") and bool(_unsure_dims(node))

    def _unsure(self, node: ir.Node) -> None:
        """Leaves open the dims of the output that its inputs do not settle; shape inference takes the first."""
        out = node.outputs[0]
        if out.shape is not None:
            dims = list(out.shape.dims)
            for place in _unsure_dims(node):
                dims[-place] = self._context.new_symbolic_dim()
            out.shape = ir.Shape(dims)


def _unsure_dims(node: ir.Node) -> list[int]:
    """Places, counted from the last dim, where inputs have dims that may or may not be equal, and none is known to be the larger."""
    shapes = [value.shape.dims for value in node.inputs if value is not None and value.shape is not None]
    unsure = []
    for place in range(1, max(map(len, shapes), default=0) + 1):
        there = [dims[-place] for dims in shapes if len(dims) >= place]
        symbols = [dim for dim in there if isinstance(dim, ir.SymbolicDim)]
        settled = any(isinstance(dim, int) and dim > 1 for dim in there)
        if symbols and not settled and not all(same(dim, symbols[0]) for dim in symbols):
            unsure.append(place)
    return unsure


def _constant(name: str, array: np.ndarray) -> ir.Value:
    return ir.val(name, const_value=ir.Tensor(array))
