"""Evaluates values of the graph in onnxruntime before a run: those of chosen inputs, of the sizes of others, and of constants alone.

A mask of an attention is such a value: `context.py` evaluates it for a length, `generation/fused_attention.py` for positions of a step.

    places = Range(0, Shape(ids)[1], 1)    visible = LessOrEqual(places, Unsqueeze(places, 1))
    computation_of(graph, visible, (), sized=graph.inputs).run({"ids": np.zeros((2, 5))})    a lower triangle of 5 x 5

Trip counts and conditions are others: `unroll.py` evaluates them node by node, for each turn of a loop.

    c = Less(Add(k, 1), 5), k = 2    ->    KnownNumbers(opset).of(c, {k: np.array(2)})    True
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.computed import is_absent
from partc.compiler.ir.graph import bodies, name_of
from partc.compiler.ir.value_info import Array
from partc.compiler.ops.registry import draws
from partc.runtime.artifact.graph.half_kernels import compute_in_float32

_LARGEST = 1 << 28
"""The most bytes of a constant; a mask may read the shape of rows that are looked up in a table of tokens."""
_MOST_NUMBERS = 1 << 12
"""The most elements of a known number."""


@dataclass(frozen=True)
class Computation:
    """The nodes that compute a value, in order, each with whether its elements are read or its shape alone."""

    value: ir.Value
    nodes: Mapping[ir.Node, bool]
    opset: int

    @cached_property
    def sources(self) -> dict[ir.Value, bool]:
        """Maps each value that no node of these makes to whether its elements are read."""
        elements_read = dict[ir.Value, bool]()
        for node, by_elements in self.nodes.items():
            below = by_elements and node.op_type != "Shape"
            elements_read |= {
                one: below or elements_read.get(one, False)
                for one in node.inputs
                if one is not None and one.producer() not in self.nodes
            }
        return elements_read

    @cached_property
    def run(self) -> Callable[[Mapping[str, Array]], Array]:
        """A function that maps arrays by the names of inputs to the value; it raises what onnxruntime raises."""
        import onnx
        from onnx import helper
        from partc.runtime.program.ort import quiet_session

        inputs, constants = list[onnx.ValueInfoProto](), list[onnx.TensorProto]()
        for source, by_elements in self.sources.items():
            constant = source.const_value
            if constant is None:
                kind = ir.DataType(source.dtype or ir.DataType.INT64).value
                inputs.append(helper.make_tensor_value_info(name_of(source), kind, None))
            else:
                array = constant.numpy() if by_elements else np.zeros(constant.shape.numpy(), constant.dtype.numpy())
                constants.append(
                    ir.serde.serialize_tensor(ir.Tensor(array, dtype=constant.dtype, name=name_of(source)))
                )
        nodes, output = [ir.serde.serialize_node(node) for node in self.nodes], onnx.ValueInfoProto()
        output.name = name_of(self.value)
        body = helper.make_graph(nodes, "value", inputs, [output], constants)
        model = helper.make_model(body, ir_version=10, opset_imports=[helper.make_opsetid("", self.opset)])
        compute_in_float32(model, bfloat16=True)
        session = quiet_session(model.SerializeToString())
        names = {one.name for one in session.get_inputs()}

        def run(arrays: Mapping[str, Array]) -> Array:
            result: Array = session.run(None, {k: array for k, array in arrays.items() if k in names})[0]
            return result

        return run


def computation_of(
    graph: ir.Graph, value: ir.Value, read: Collection[ir.Value], sized: Collection[ir.Value] = ()
) -> Computation | None:
    """Returns the computation of a value from the elements of `read`, the sizes of `sized`, and constants.

    Returns None if the value depends on anything else, a body or an op of another domain.
    """
    needed, waiting = dict[ir.Node, bool](), [(value, True)]
    while waiting:
        one, by_elements = waiting.pop()
        producer = one.producer()
        if producer is None:
            constant = one.const_value
            if one in read or one in sized:
                if by_elements and one not in read:
                    return None
            elif constant is None or constant.nbytes > _LARGEST or (by_elements and is_absent(constant)):
                return None
        elif producer not in needed or (by_elements and not needed[producer]):
            if not _is_plain(producer):
                return None
            needed[producer] = by_elements
            below = by_elements and producer.op_type != "Shape"
            waiting += [(operand, below) for operand in producer.inputs if operand is not None]
    return Computation(value, {node: needed[node] for node in graph if node in needed}, graph.opset_imports.get("", 24))


def _is_plain(node: ir.Node) -> bool:
    """Whether a node is an op of the standard without a body."""
    return node.domain in ("", "ai.onnx") and not any(bodies(node))


class KnownNumbers:
    """Computes integers and booleans that are known before a run: counters, trip counts, conditions, sizes."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.memo: dict[ir.Value, Array | None] = {}
        """Maps each value of the main graph that was asked for to its numbers; None: only the run knows them."""
        self._runs: dict[ir.Node, Callable[[Mapping[str, Array]], Array]] = {}

    def of(self, value: ir.Value | None, memo: dict[ir.Value, Array | None] | None = None) -> Array | None:
        """Returns the numbers that a value always has, in a turn those that follow from `memo`; None if only the run knows them."""
        if value is None:
            return None
        memo = self.memo if memo is None else memo
        if value not in memo:
            array = self._computed(value, memo)
            small = array is not None and array.dtype.kind in "iub" and array.size <= _MOST_NUMBERS
            memo[value] = array if small else None
        return memo[value]

    def _computed(self, value: ir.Value, memo: dict[ir.Value, Array | None]) -> Array | None:
        constant = None if value.is_graph_input() else ir.convenience.get_const_tensor(value)
        if constant is not None:
            return constant.numpy() if constant.size <= _MOST_NUMBERS else None
        node = value.producer()
        if node is None or not _is_plain(node) or len(node.outputs) != 1 or draws(node):
            return None
        if node.op_type in ("Shape", "Size"):
            return _extents(node)
        operands = {operand: self.of(operand, memo) for operand in node.inputs if operand is not None}
        arrays = {name_of(operand): array for operand, array in operands.items() if array is not None}
        if len(arrays) < len(operands):
            return None
        if node.op_type in ("Div", "Mod") and not (arrays[name_of([*operands][-1])] > 0).all():
            return None  # onnxruntime ends the process where the least integer is divided by -1
        try:
            if node not in self._runs:
                self._runs[node] = Computation(value, {node: True}, self.opset).run
            return self._runs[node](arrays)
        except Exception:  # onnxruntime's own kinds, for operands that do not fit: the run refuses them
            return None


def _extents(node: ir.Node) -> Array | None:
    """The result of a Shape or Size whose operand has a known shape."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None or not shape.is_static():
        return None
    extents = np.array(shape.numpy(), np.int64)
    if node.op_type == "Size":
        return np.array(extents.prod(), np.int64)
    return extents[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(extents))]
