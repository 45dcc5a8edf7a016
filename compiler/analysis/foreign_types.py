"""Output types of ops that only onnxruntime knows: it infers them from a model of that one node.

Shapes are not inferred: they stay unknown, and a message with such a value carries its shape."""

from __future__ import annotations

import functools
from typing import Any

import onnx
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext
from partc.compiler.ir.graph import NEWEST_OPSET, operand_name

_STANDARD = ("", "ai.onnx")


@functools.cache
def _ops() -> frozenset[tuple[str, str]]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset((schema.domain, schema.name) for schema in state.get_all_operator_schema())


def is_foreign(domain: str, op_type: str) -> bool:
    """Whether an op is one of onnxruntime's own, which the ONNX standard does not have."""
    return domain not in _STANDARD and (domain, op_type) in _ops()


def foreign_types(ctx: ShapeInferenceContext, node: ir.Node) -> None:
    """Sets the types of a node's outputs, where onnxruntime accepts the node."""
    if any(value is not None and value.type is None for value in node.inputs):
        return
    proto = ir.serde.serialize_node(node)
    assert isinstance(proto, onnx.NodeProto)
    del proto.metadata_props[:]
    proto.name = proto.doc_string = ""
    given = {value.name: value for value in node.inputs if value is not None and value.name}
    kinds = [value.type for value in given.values() if value.type is not None]
    inputs = tuple(ir.serde.serialize_type(kind).SerializeToString(deterministic=True) for kind in kinds)
    found = _types(proto.SerializeToString(deterministic=True), tuple(map(str, given)), inputs, ctx.opset)
    for out in node.outputs:
        if out.type is None:
            out.type = _named(found.get(operand_name(out), ""))


def _named(text: str) -> ir.TypeProtocol | None:
    """The type of a text such as `seq(tensor(float))`; None where it is of another kind."""
    head, _, rest = text.partition("(")
    inner = rest.removesuffix(")")
    match head:
        case "tensor":
            name = {"float": "FLOAT", "double": "DOUBLE"}.get(inner, inner.upper())
            return ir.TensorType(ir.DataType[name]) if name in ir.DataType.__members__ else None
        case "seq" | "optional":
            element = _named(inner)
            return None if element is None else (ir.SequenceType if head == "seq" else ir.OptionalType)(element)
        case _:
            return None


@functools.lru_cache(maxsize=256)
def _types(node: bytes, names: tuple[str, ...], types: tuple[bytes, ...], opset: int) -> dict[str, str]:
    import onnxruntime

    proto = onnx.NodeProto.FromString(node)
    ports = []
    for name, kind in zip(names, types, strict=True):
        port = onnx.ValueInfoProto(name=name)
        port.type.ParseFromString(kind)
        ports.append(port)
    made = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
    graph = onnx.helper.make_graph([proto], "one", ports, made)
    imports = [onnx.helper.make_opsetid("", min(opset, NEWEST_OPSET)), onnx.helper.make_opsetid(proto.domain, 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    options: Any = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return {out.name: out.type for out in session.get_outputs()}
    except Exception:
        return {}
