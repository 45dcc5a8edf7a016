"""Shape inference for the whole compiler: the rules of `shape_rules.py`, with the plan's promises about dims.

The promises for the dims decide not only the result, but also how long inference takes: where a Split is known to be exact, the sizes of
its outputs are products instead of nested roundings. Shapes that a model declares for its own values are not trusted, since nothing checks
them.
"""

from __future__ import annotations

import onnx_ir as ir
from partc.compiler.analysis.shape_rules import Known, tolerant_rules
from partc.compiler.dims.normal import normal_dim
from partc.compiler.ir.graph import bodies, graphs_of

_SCALAR_TYPE = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.STRING: "string",
    ir.DataType.BOOL: "bool",
    ir.DataType.COMPLEX64: "complex64",
    ir.DataType.COMPLEX128: "complex128",
}


def infer_shapes(model: ir.Model, known: Known) -> dict[ir.Node, str]:
    """Sets the type and shape of every value of a model, inferred from its inputs' with the facts `known` of these inputs' dims.

    Unknown shapes are None, and unknown dims have no name. Returns the reason for each node whose rule failed.
    """
    _forget_declared_shapes(model.graph)
    for value in model.graph.inputs:
        if value.shape is not None:
            value.shape = ir.Shape([normal_dim(dim, known) for dim in value.shape.dims])
    import onnx_shape_inference

    with tolerant_rules(known) as failed:
        onnx_shape_inference.infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
    _fill_missing_types(model)
    return failed


def type_text(kind: ir.TypeProtocol | None) -> str:
    """Returns a type as onnxruntime writes it: `tensor(float)`, `seq(tensor(int64))`; `unknown` where it is not known."""
    match kind:
        case ir.TensorType(dtype=dtype):
            return f"tensor({_SCALAR_TYPE.get(dtype, dtype.name.lower())})"
        case ir.SparseTensorType(dtype=dtype):
            return f"sparse_tensor({_SCALAR_TYPE.get(dtype, dtype.name.lower())})"
        case ir.SequenceType(elem_type=inner):
            return f"seq({type_text(inner)})"
        case ir.OptionalType(elem_type=inner):
            return f"optional({type_text(inner)})"
        case _:
            return "unknown"


def _forget_declared_shapes(graph: ir.Graph) -> None:
    """Removes the shapes that the model declares, but for fixed ones of a Loop's trip count and condition, which are scalars."""
    for part in graphs_of(graph):
        for node in part:
            for value in node.outputs:
                value.shape = None
            for body in bodies(node):
                for k, value in enumerate(body.inputs):
                    if node.op_type != "Loop" or k > 1 or (value.shape is not None and not value.shape.is_static()):
                        value.shape = None


def _fill_missing_types(model: ir.Model) -> None:
    """Fills types that the symbolic engine leaves open from onnx's own inference, which knows every standard op."""
    missing = {
        value.name: value
        for node in model.graph
        for value in node.outputs
        if value.name and type_text(value.type).count("unknown")
    }
    if not missing:
        return
    import onnx

    light = ir.serde.serialize_model(_without_weights(model))
    try:
        inferred = onnx.shape_inference.infer_shapes(light)
    except Exception:
        return
    for info in [*inferred.graph.value_info, *inferred.graph.output]:
        if info.name in missing and info.HasField("type"):
            missing[info.name].type = ir.serde.deserialize_type_proto_for_type(info.type)


def _without_weights(model: ir.Model) -> ir.Model:
    """A copy whose large weights are inputs, so that it can become one proto whatever their size."""
    copy = model.clone()
    for name, value in list(copy.graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > 1024:
            value.type = value.type or ir.TensorType(value.const_value.dtype)
            value.shape = ir.Shape(value.const_value.shape.numpy())
            del copy.graph.initializers[name]
            value.const_value = None
            copy.graph.inputs.append(value)
    return copy
