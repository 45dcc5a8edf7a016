"""Types of the values that no pass has typed in a rank's program: bounds of slices, masks, sums of gradients, and the like.

The passes type the values of the model. What stands between them is typed here, for rank files and dumps, by each op's own shape
inference from what it reads; where that says nothing of an output, it has no type.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

import onnx
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.ir.graph import bodies
from partc.compiler.ir.program import Program
from partc.compiler.ir.rank_program import ComputeOp, RankConstant, RankProgram, TaskBody
from partc.compiler.ir.value_info import Array, Shape


class HelperTypes:
    """The types that no pass has told, of the values of a program's rank programs; an op that several ranks have is inferred once."""

    def __init__(self, program: Program) -> None:
        self._opsets = program.model.graph.opset_imports
        self._found: dict[Hashable, dict[str, onnx.TypeProto]] = {}
        self._of: dict[Hashable, dict[str, onnx.TypeProto]] = {}

    def of(self, part: RankProgram, body: TaskBody | None = None) -> dict[str, onnx.TypeProto]:
        """By name the types of a rank program's values, or of those in the body of a task, that no pass has typed."""
        key = part.likeness, body
        if key not in self._of:
            self._of[key] = self._typed(part, body)
        return self._of[key]

    def _typed(self, part: RankProgram, body: TaskBody | None) -> dict[str, onnx.TypeProto]:
        known: dict[str, onnx.TypeProto] = {}
        if body is not None:
            part = replace(part, steps=body.steps, types=body.types)
        for step in part.steps:
            if isinstance(step, ComputeOp):
                untyped = [one.name for one in step.node.outputs if one.name and one.name not in part.types]
                if untyped:
                    made = self._outputs(part, step, known)
                    known |= {name: made[name] for name in untyped if name in made}
        return {
            name: kind
            for name, kind in known.items()
            if name not in part.types and name not in part.constants and name not in part.scalars
        }

    def _outputs(
        self, part: RankProgram, step: ComputeOp, known: dict[str, onnx.TypeProto]
    ) -> dict[str, onnx.TypeProto]:
        """What the op's schema infers of a node's outputs; nothing where it cannot."""
        names = [value.name for value in step.node.inputs if value is not None and value.name]
        given = {name: kind for name in names if (kind := _type_of(part, name, known)) is not None}
        fixed = {name: one for name in names if not isinstance(one := part.constants.get(name), RankConstant | None)}
        key = (
            step,
            tuple([kind.SerializeToString() for kind in given.values()]),
            tuple([(one.dtype.str, one.shape, one.tobytes()) for one in fixed.values()]),
        )
        if key not in self._found:
            self._found[key] = _inferred(step.node, self._opsets, given, fixed) if len(given) == len({*names}) else {}
        return self._found[key]


def _inferred(
    node: ir.Node, opsets: Mapping[str, int], given: dict[str, onnx.TypeProto], fixed: Mapping[str, Array]
) -> dict[str, onnx.TypeProto]:
    if bodies(node):
        return {}
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
        data = {name: onnx.numpy_helper.from_array(one, name) for name, one in fixed.items()}
        return dict(onnx.shape_inference.infer_node_outputs(schema, ir.serde.serialize_node(node), given, data))
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
        return {}


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


def helper_type_text(kind: onnx.TypeProto) -> str:
    """A type as the dumps write it: `<tensor(int64), (batch, 2)>`."""
    tensor = kind.tensor_type
    name = type_text(ir.TensorType(ir.DataType(tensor.elem_type)))
    if not tensor.HasField("shape"):
        return f"<{name}, ?>"
    dims = (str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return f"<{name}, ({', '.join(dims)})>"
