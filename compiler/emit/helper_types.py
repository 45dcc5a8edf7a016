"""Types of the values that no pass has typed in a rank's program: bounds of slices, masks, sums of gradients, and the like.

The passes type the values of the model. What stands between them is typed here, for rank files and dumps, by each op's own shape
inference from what it reads; where that says nothing of an output, it has no type.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import onnx
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.constants import RankConstant
from partc.compiler.ir.graph import bodies
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Body, Compute, Op, RankProgram, Value
from partc.compiler.ir.value_info import Array, Shape


def node_proto(step: Compute, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    """The op's node with its attributes and bodies; what bodies read from outside has the model's names there."""
    node = step.node
    proto = onnx.NodeProto(
        op_type=node.op_type,
        domain=node.domain or None,
        overload=node.overload or None,
        input=inputs,
        output=outputs,
    )
    proto.attribute.extend([ir.serde.serialize_attribute(one) for one in node.attributes.data.values()])
    return proto


Types = Mapping[Value, onnx.TypeProto]


class HelperTypes:
    """The types that no pass has told, of the values of a program's rank programs; an op that several ranks have is inferred once."""

    def __init__(self, program: Complete) -> None:
        self._opsets = program.model.graph.opset_imports
        self._found: dict[Hashable, Sequence[onnx.TypeProto | None]] = {}
        self._of: dict[tuple[Op, ...], Types] = {}

    def of(self, part: RankProgram, body: Body | None = None) -> Types:
        """The types of a rank program's values, or of those in the body of a task, that no pass has typed."""
        steps = part.steps if body is None else body.steps
        if steps not in self._of:
            self._of[steps] = self._typed(steps, part.scalars)
        return self._of[steps]

    def _typed(self, steps: Sequence[Op], scalars: Sequence[Value]) -> Types:
        known: dict[Value, onnx.TypeProto | None] = dict.fromkeys(scalars, _tensor(ir.DataType.FLOAT, ()))
        types: dict[Value, onnx.TypeProto] = {}
        for step in steps:
            if isinstance(step, Compute) and None in [value.of for value in step.makes]:
                for value, kind in zip(step.outputs, self._outputs(step, known), strict=False):
                    if value is not None and value.of is None and kind is not None:
                        known[value] = types[value] = kind
        return types

    def _outputs(self, step: Compute, known: dict[Value, onnx.TypeProto | None]) -> Sequence[onnx.TypeProto | None]:
        """The outputs' types as the op's schema infers them; empty where it cannot."""
        operand_types: dict[Value, onnx.TypeProto] = {}
        for value in dict.fromkeys(one for one in step.inputs if one is not None):
            if value not in known:
                known[value] = _type_of(value)
            if (kind := known[value]) is None:
                return ()
            operand_types[value] = kind
        fixed = {value: one for value in operand_types if not isinstance(one := value.constant, RankConstant | None)}
        key = (
            step,
            tuple([kind.SerializeToString() for kind in operand_types.values()]),
            tuple([(one.dtype.str, one.shape, one.tobytes()) for one in fixed.values()]),
        )
        if key not in self._found:
            self._found[key] = _inferred(step, self._opsets, operand_types, fixed)
        return self._found[key]


def _inferred(
    step: Compute, opsets: Mapping[str, int], operand_types: Types, fixed: Mapping[Value, Array]
) -> Sequence[onnx.TypeProto | None]:
    node = step.node
    if bodies(node):
        return ()
    if (node.domain, node.op_type) == ("com.microsoft", "GroupQueryAttention"):  # which has no schema here
        return _of_fused_attention(step, operand_types)
    names = {value: str(k) for k, value in enumerate(dict.fromkeys((*step.reads, *step.makes)))}
    outputs = ["" if value is None else names[value] for value in step.outputs]
    proto = node_proto(step, ["" if value is None else names[value] for value in step.inputs], outputs)
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
        types = {names[value]: kind for value, kind in operand_types.items()}
        data = {names[value]: onnx.numpy_helper.from_array(one, names[value]) for value, one in fixed.items()}
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
        return ()
    return [found.get(name) for name in outputs]


def _of_fused_attention(step: Compute, operand_types: Types) -> Sequence[onnx.TypeProto | None]:
    """The types of a result, of two caches, and of scores, whose number of entries is an operand."""
    operands = [None if value is None else operand_types[value] for value in step.inputs]
    query, keys, values = operands[0], operands[3], operands[4]
    if query is None:
        return ()
    scores = onnx.TypeProto()
    scores.CopyFrom(query)
    rows, tokens, _ = query.tensor_type.shape.dim
    del scores.tensor_type.shape.dim[:]
    heads = onnx.TensorShapeProto.Dimension(dim_value=step.node.attributes.get_int("num_heads", 0))
    scores.tensor_type.shape.dim.extend([rows, heads, tokens, onnx.TensorShapeProto.Dimension()])
    return query, keys, values, scores


def _type_of(value: Value) -> onnx.TypeProto | None:
    if value.constant is not None:
        return _tensor(ir.DataType.from_numpy(value.constant.dtype), value.constant.shape)
    if value.of is not None and value.of.dtype is not None:
        return _tensor(value.of.dtype, value.shape)
    return None


def _tensor(dtype: ir.DataType, shape: Shape | Iterable[int] | None) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype.value, None if shape is None else list(shape))


def helper_type_text(kind: onnx.TypeProto) -> str:
    """A type as the dumps write it: `<tensor(int64), (batch, 2)>`."""
    tensor = kind.tensor_type
    name = type_text(ir.TensorType(ir.DataType(tensor.elem_type)))
    if not tensor.HasField("shape"):
        return f"<{name}, ?>"
    dims = (str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return f"<{name}, ({', '.join(dims)})>"
