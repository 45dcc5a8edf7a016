"""Types of the values that no pass has typed in a rank's program: bounds of slices, masks, sums of gradients, and the like.

The passes type the values of the model. What stands between them is typed here, for the dumps, by each op's own shape inference from
what it reads; where that says nothing of an output, it has no type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import onnx
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.program import Program, Shape
from partc.compiler.ir.rank_program import ComputeOp, RankConstant, RankProgram, TaskBody


def helper_types(program: Program, part: RankProgram, body: TaskBody | None = None) -> dict[str, str]:
    """By name the types of a part's values, or of those in the body of a task, that no pass has typed, as the dumps write them."""
    known: dict[str, onnx.TypeProto] = {}
    opsets = program.model.graph.opset_imports
    if body is not None:
        part = replace(part, steps=body.steps, types=body.types)
    for step in part.steps:
        if not isinstance(step, ComputeOp) or not any(_untyped(part, value) for value in step.node.outputs):
            continue
        made = _outputs(part, step.node, known, opsets)
        names = [value.name or "" for value in step.node.outputs if _untyped(part, value)]
        known |= {name: made[name] for name in names if name in made}
    return {name: _text(kind) for name, kind in known.items() if name not in part.types and name not in part.constants}


def _untyped(part: RankProgram, value: ir.Value) -> bool:
    return bool(value.name) and value.name not in part.types


def _outputs(
    part: RankProgram, node: ir.Node, known: dict[str, onnx.TypeProto], opsets: Mapping[str, int]
) -> Mapping[str, onnx.TypeProto]:
    """What the op's schema infers of a node's outputs; nothing where it cannot."""
    if any(attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attr in node.attributes.values()):
        return {}
    names = [value.name or "" for value in node.inputs if value is not None and value.name]
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
        proto = ir.to_proto(node)
        given = {name: kind for name in names if (kind := _type_of(part, name, known)) is not None}
        if len(given) < len({*names}):
            return {}
        fixed = {name: one for name in names if not isinstance(one := part.constants.get(name), RankConstant | None)}
        data = {name: onnx.numpy_helper.from_array(one, name) for name, one in fixed.items()}
        found: Mapping[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(schema, proto, given, data)
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
        return {}
    return found


def _type_of(part: RankProgram, name: str, known: dict[str, onnx.TypeProto]) -> onnx.TypeProto | None:
    if name not in known:
        if name in part.constants:
            array = part.constants[name]
            known[name] = _tensor(ir.DataType.from_numpy(array.dtype), array.shape)
        elif name in part.scalars:
            known[name] = _tensor(ir.DataType.FLOAT, ())
        elif name in part.types and (dtype := part.types[name][0].dtype) is not None:
            known[name] = _tensor(dtype, part.types[name][1])
    return known.get(name)


def _tensor(dtype: ir.DataType, shape: Shape | Iterable[int] | None) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype.value, None if shape is None else list(shape))


def _text(kind: onnx.TypeProto) -> str:
    tensor = kind.tensor_type
    name = type_text(ir.TensorType(ir.DataType(tensor.elem_type)))
    if not tensor.HasField("shape"):
        return f"<{name}, ?>"
    dims = (str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return f"<{name}, ({', '.join(dims)})>"
