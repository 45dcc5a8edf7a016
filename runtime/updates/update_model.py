"""An optimizer's function as a model of its own over flat buffers, and what its body proves about running it.

onnxruntime runs a chain of element-wise nodes one pass over memory each, so a large buffer is updated shard by shard, each small enough
that all passes but the first find it in the cache. That is right where the body is element-wise (`is_elementwise`), and the next
parameter and slots may lie where the old ones did where nothing reads those after they are overwritten (`is_in_place`).
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import FunctionProto, TensorProto, helper

from ..artifact.lr_schedule import SCALARS

ELEMENTWISE = frozenset(("Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Sqrt", "Sub"))
NEXT = "_next"
IR_VERSION = 10
_LENGTH = "n"


def is_elementwise(function: FunctionProto) -> bool:
    """Whether every output has, in each place, what its inputs have there: all nodes are element-wise ops or scalar constants."""
    return all(
        (node.op_type in ELEMENTWISE and node.domain in ("", "ai.onnx"))
        or (node.op_type == "Constant" and [attribute.name for attribute in node.attribute] == ["value_float"])
        for node in function.node
    )


def is_in_place(function: FunctionProto) -> bool:
    """Whether each output `x_next` may be written where the input `x` lies.

    It may if an element-wise node makes it and every other reader of `x` runs before that node in any order, because it leads to it.
    """
    makers = {output: node for node in function.node for output in node.output}
    for output in function.output:
        if not output.endswith(NEXT):
            continue
        if output not in makers:
            return False
        maker = makers[output]
        before: set[str] = set()
        reached = list(maker.input)
        while reached:
            name = reached.pop()
            if name not in before:
                before.add(name)
                reached += makers[name].input if name in makers else ()
        old = output.removesuffix(NEXT)
        readers = [node for node in function.node if old in node.input and node is not maker]
        if maker.op_type not in ELEMENTWISE or any(before.isdisjoint(node.output) for node in readers):
            return False
    return True


def flat_model(function: FunctionProto, attributes: Mapping[str, float], element: int = TensorProto.FLOAT) -> bytes:
    """A model with the function's body, its attributes filled in; tensors have the length `n`, scalars rank 0 and float32.

    Inputs and outputs have the function's own names and order. `element` is the type of the tensors: float32, or float64 for a
    function that is `Double`. Raises KeyError for an attribute that is not given.
    """
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [])
        if name in SCALARS
        else helper.make_tensor_value_info(name, element, [] if name == "ratio" else [_LENGTH])
        for name in function.input
    ]
    outputs = [helper.make_tensor_value_info(name, element, [_LENGTH]) for name in function.output]
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
