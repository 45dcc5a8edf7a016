"""Perceptrons in a list, as the tests of searches train and shard them, and the plan by which they are trained."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper
from proposal_case import Graph

WIDE, DEEP = 64, 2
TRAIN = """ranks: 1
train:
  loss: {type: mse, prediction: head.Add.out, target: label}
  optimizer: {type: adam, lr: 0.01}
  batch: 64
"""


def layers(width: int = WIDE, depth: int = DEEP, batch: int | str = "batch") -> onnx.ModelProto:
    """Perceptrons in a list, each of an up and a down projection, and a head."""
    g = Graph()
    x = "x"
    for k in range(depth):
        h = g.node(f"layers.{k}.act", "Relu", g.linear(f"layers.{k}.up", x, width, 4 * width))
        x = g.linear(f"layers.{k}.down", h, 4 * width, width)
    out = g.linear("head", x, width, 6)
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, size]) for name, size in (("x", width), (out, 6))
    ]
    graph = helper.make_graph(g.nodes, "g", ports[:1], ports[1:], g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
