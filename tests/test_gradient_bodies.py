"""Bodies of branches: a gradient that would have to flow into one is refused, never left out in silence."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from partc.compiler.ops.gradient import NoGradient, differentiate_nodes

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
branches (float[3, 5] x, float[3, 5] w, bool c) => (float[3, 5] y) {
  h = Mul(x, w)
  b = If (c) <then_branch = one () => (float[3, 5] t) { t = Neg(h) }, else_branch = two () => (float[3, 5] e) { e = Relu(x) }>
  y = Tanh(b)
}
"""


def nodes() -> list[ir.Node]:
    return list(ir.from_proto(onnx.parser.parse_model(TEXT)).graph)


def test_a_gradient_into_a_body_is_refused() -> None:
    with pytest.raises(NoGradient, match="body of If"):
        differentiate_nodes(nodes(), {"y": "y.dy"}, ["w"])


def test_a_body_that_is_not_between_is_left_alone() -> None:
    assert differentiate_nodes(nodes(), {"h": "h.dy"}, ["w"]).gradients == {"w": "h.grad.Mul"}
