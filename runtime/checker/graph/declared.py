"""Types and shapes that a rank file declares of its values."""

from __future__ import annotations

from typing import TypeAlias

from onnx import ModelProto, TypeProto, helper
from partc.runtime.artifact.format import Shape
from partc.runtime.artifact.tasks.calls import declared, tensors_of
from partc.runtime.artifact.tensors.dtypes import type_text

ValueType: TypeAlias = tuple[str, Shape]
"""A type as the manifest writes it, and a shape."""


def type_of(type: TypeProto) -> ValueType:
    """Returns a type as the manifest writes it, and its shape, None if unknown: `("tensor(float)", ["batch", 10])`."""
    tensor = type.tensor_type
    if not type.HasField("tensor_type") or not tensor.HasField("shape"):
        return type_text(type), None
    shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
    return type_text(type), None if "" in shape else shape


def declared_types(model: ModelProto) -> dict[str, ValueType]:
    """Maps each value to the type that a rank file declares for it: inputs, outputs, value_info and initializers, and values of tasks."""
    types: dict[str, ValueType] = {}
    known: dict[bytes, ValueType] = {}  # the values of all microbatches have the types of one
    for name, tensor in tensors_of(model).items():
        types[name] = type_text(helper.make_tensor_type_proto(tensor.data_type, None)), list(tensor.dims)
    for name, port in declared(model):
        text = port.type.SerializeToString(deterministic=True)
        if text not in known:
            known[text] = type_of(port.type)
        types[name] = known[text]
    return types
