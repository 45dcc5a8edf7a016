"""Random numbers are the same on every rank that holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from partc.compiler.ops.registry import rule_of
from partc.compiler.ops.rule import Local

OPS: dict[str, tuple[tuple[int, ...] | None, dict[str, Any]]] = {
    "RandomNormal": (None, {"shape": [5, 7]}),
    "RandomUniform": (None, {"shape": [5, 7]}),
    "RandomNormalLike": ((5, 7), {}),
    "RandomUniformLike": ((5, 7), {}),
    "Bernoulli": ((5, 7), {}),
    "Multinomial": ((5, 7), {"sample_size": 9}),
}


def emitted(op_type: str, output: str = "y", **more: Any) -> ir.Node:
    """The node that a rank runs."""
    shape, attributes = OPS[op_type]
    x = ir.Value(name="x", shape=ir.Shape(shape or ()), type=ir.TensorType(ir.DataType.FLOAT))
    y = ir.Value(name=output, shape=ir.Shape([5, 7]))
    given = ir.convenience.convert_attributes({**attributes, **more})
    node = ir.Node("", op_type, [x] if shape else [], given, outputs=[y])
    rule = rule_of(node)
    assert rule.factors == ()
    assert rule.local is not None
    local = Local(node, rule, {}, {}, ["x"] if shape else [], [output], {}, {})
    rule.local(local)
    return local.nodes[0]


def drawn(node: ir.Node) -> np.ndarray[Any, Any]:
    """The numbers of a session of its own."""
    given = [ir.Value(name=value.name, type=ir.TensorType(ir.DataType.FLOAT)) for value in node.inputs if value]
    outputs = [ir.Value(name=value.name) for value in node.outputs]
    alone = ir.Node("", node.op_type, given, node.attributes.values(), outputs=outputs)
    graph = ir.Graph(given, outputs, nodes=[alone], opset_imports={"": 21}, name="draw")
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    found: np.ndarray[Any, Any] = session.run(None, {"x": np.full((5, 7), 0.5, np.float32)} if given else {})[0]
    return found


@pytest.mark.parametrize("op_type", OPS)
def test_two_ranks_draw_the_same(op_type: str) -> None:
    assert np.array_equal(drawn(emitted(op_type)), drawn(emitted(op_type)))


def test_two_nodes_draw_different_numbers() -> None:
    assert not np.array_equal(drawn(emitted("RandomNormal", "y")), drawn(emitted("RandomNormal", "z")))


@pytest.mark.parametrize("op_type", OPS)
def test_a_seed_of_the_model_is_kept(op_type: str) -> None:
    assert emitted(op_type, seed=3.0).attributes.get_float("seed", 0.0) == 3.0
