"""Evaluates a value of the graph in onnxruntime, if it depends on chosen inputs, on the sizes of others, and on constants alone.

A mask of an attention is such a value: `context.py` evaluates it for a length, `generation/masks.py` for positions of a step.

    places = Range(0, Shape(ids)[1], 1)    visible = LessOrEqual(places, Unsqueeze(places, 1))
    computation_of(graph, visible, (), sized=graph.inputs)({"ids": np.zeros((2, 5))})    a lower triangle of 5 x 5
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from partc.compiler.ir.computed import is_absent
from partc.compiler.ir.graph import name_of
from partc.runtime.artifact.graph.half_kernels import compute_in_float32

_LARGEST = 1 << 28
"""The most bytes of a constant; a mask may read the shape of rows that are looked up in a table of tokens."""


@dataclass(frozen=True)
class Computation:
    """The nodes that compute a value, in order, each with whether its elements are read or its shape alone."""

    graph: ir.Graph
    value: ir.Value
    nodes: Mapping[ir.Node, bool]

    @cached_property
    def sources(self) -> dict[ir.Value, bool]:
        """Maps each input and constant to whether its elements are read."""
        elements_read = dict[ir.Value, bool]()
        for node, by_elements in self.nodes.items():
            below = by_elements and node.op_type != "Shape"
            elements_read |= {
                one: below or elements_read.get(one, False)
                for one in node.inputs
                if one is not None and one.producer() is None
            }
        return elements_read

    @cached_property
    def run(self) -> Callable[[Mapping[str, npt.NDArray[Any]]], npt.NDArray[Any]]:
        """A function that maps arrays by the names of inputs to the value; it raises what onnxruntime raises."""
        import onnx
        import onnxruntime
        from onnx import helper

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
        opsets = [helper.make_opsetid("", self.graph.opset_imports.get("", 24))]
        model = helper.make_model(body, ir_version=10, opset_imports=opsets)
        compute_in_float32(model, bfloat16=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = {one.name for one in session.get_inputs()}

        def run(arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
            found: npt.NDArray[Any] = session.run(None, {k: array for k, array in arrays.items() if k in names})[0]
            return found

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
            if producer.domain not in ("", "ai.onnx") or any(
                attribute.type == ir.AttributeType.GRAPH for attribute in producer.attributes.values()
            ):
                return None
            needed[producer] = by_elements
            below = by_elements and producer.op_type != "Shape"
            waiting += [(operand, below) for operand in producer.inputs if operand is not None]
    return Computation(graph, value, {node: needed[node] for node in graph if node in needed})
