"""The model y = 2 x, for losses alone."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

FLOAT = onnx.TensorProto.FLOAT


def model(dims: Sequence[int | str | None], kind: int = FLOAT, opset: int = 21) -> ir.Model:
    """y = 2 x."""
    x = onnx.helper.make_tensor_value_info("x", kind, list(dims))
    y = onnx.helper.make_tensor_value_info("y", kind, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "x"], ["y"], "double")], "m", [x], [y])
    return ir.from_proto(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
    )
