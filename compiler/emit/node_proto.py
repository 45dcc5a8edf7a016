"""An op as a node of ONNX, over operands of these names."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir
from partc.compiler.ir.programs import Compute


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
