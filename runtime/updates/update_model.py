"""Builds a model from an optimizer's function, to run over flat buffers.

onnxruntime makes one pass over memory for each node in a chain of element-wise nodes, so a large buffer is updated in slices, each small
enough that all passes but the first find it in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import FunctionProto, TensorProto, ValueInfoProto, helper
from partc.runtime.artifact.graph.row_function import IDS
from partc.runtime.artifact.training.scalars import SCALARS

IR_VERSION = 10
_LENGTH = "n"


def flat_model(function: FunctionProto, attributes: Mapping[str, float], element: int = TensorProto.FLOAT) -> bytes:
    """Returns a model with the function's body and its attributes filled in; tensors have the length `n`, scalars rank 0 and float32.

    Inputs and outputs have the function's own names and order. `element` is the type of the tensors: float32, or float64 for a function
    that is `Double`. KeyError for a missing attribute.
    """
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
        if name in SCALARS
        else helper.make_tensor_value_info(name, element, [] if name == "ratio" else [_LENGTH])
        for name in function.input
    ]
    outputs = [helper.make_tensor_value_info(name, element, [_LENGTH]) for name in function.output]
    return _model(function, attributes, inputs, outputs)


def row_model(
    function: FunctionProto, attributes: Mapping[str, float], element: int, ranks: Mapping[str, int]
) -> bytes:
    """Returns the model of a function over ids and rows: each tensor has its rank from `ranks`, and any dims."""
    kinds = {IDS: TensorProto.INT64, **dict.fromkeys(SCALARS, TensorProto.FLOAT)}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, kinds.get(name, element), [None] * ranks.get(name, 0)) for name in names]
        for names in (function.input, function.output)
    )
    return _model(function, attributes, inputs, outputs)


def _model(
    function: FunctionProto,
    attributes: Mapping[str, float],
    inputs: list[ValueInfoProto],
    outputs: list[ValueInfoProto],
) -> bytes:
    graph = helper.make_graph([], function.name, inputs, outputs)
    for node in function.node:
        copy = graph.node.add()
        copy.CopyFrom(node)
        for attribute in copy.attribute:
            if attribute.ref_attr_name:
                attribute.f = attributes[attribute.ref_attr_name]
                attribute.ref_attr_name = ""
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=list(function.opset_import))
    return bytes(model.SerializeToString())
