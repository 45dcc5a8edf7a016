"""Layers of experts between two products, with batches and a training."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from onnx import numpy_helper
from partc.compiler.ir.program import Complete
from partc.runtime.artifact.tensors.dtypes import Array

SGD = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.3}}\n"
WIDTH, EXPERTS, INNER, CHOICES = 6, 12, 10, 2
LAYER = """
  [LAYER_router] LAYER_logits = MatMul(LAYER_in, LAYER_router_weight)
  [LAYER_top] LAYER_best, LAYER_chosen = TopK(LAYER_logits, two)
  [LAYER_share] LAYER_share = Softmax <axis = 1> (LAYER_best)
  [LAYER_flat] LAYER_ids = Reshape(LAYER_chosen, all)
  [LAYER_apart] LAYER_x3 = Unsqueeze(LAYER_in, one)
  [LAYER_twice] LAYER_x2 = Expand(LAYER_x3, twice)
  [LAYER_spread] LAYER_rows = Reshape(LAYER_x2, entries)
  [LAYER_row] LAYER_x4 = Unsqueeze(LAYER_rows, one)
  [LAYER_up_of] LAYER_ups = Gather(LAYER_up_weight, LAYER_ids)
  [LAYER_up] LAYER_u4 = MatMul(LAYER_x4, LAYER_ups)
  [LAYER_up_flat] LAYER_u = Squeeze(LAYER_u4, one)
  [LAYER_column] LAYER_c = Unsqueeze(LAYER_ids, one)
  [LAYER_pick_bias] LAYER_b = GatherND(LAYER_bias, LAYER_c)
  [LAYER_biased] LAYER_h = Add(LAYER_u, LAYER_b)
  [LAYER_act] LAYER_a = Tanh(LAYER_h)
  [LAYER_down_of] LAYER_downs = Gather(LAYER_down_weight, LAYER_ids)
  [LAYER_a_row] LAYER_a4 = Unsqueeze(LAYER_a, one)
  [LAYER_down] LAYER_d4 = MatMul(LAYER_a4, LAYER_downs)
  [LAYER_down_flat] LAYER_d = Squeeze(LAYER_d4, one)
  [LAYER_home] LAYER_d3 = Reshape(LAYER_d, apart)
  [LAYER_shares] LAYER_s3 = Unsqueeze(LAYER_share, last)
  [LAYER_weighed] LAYER_w = Mul(LAYER_d3, LAYER_s3)
  [LAYER_sum] LAYER_out = ReduceSum <keepdims = 0> (LAYER_w, one)
"""


def model(layers: int = 1) -> onnx.ModelProto:
    """A product, layers of experts, and a product."""
    body = "  [first] l0_in = MatMul(x, first_weight)\n"
    for k in range(layers):
        body += LAYER.replace("LAYER", f"l{k}") + f"  [l{k}_tanh] l{k + 1}_in = Tanh(l{k}_out)\n"
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, {WIDTH}] x) => (float[batch, 4] y)
    <int64[1] two = {{{CHOICES}}}, int64[1] one = {{1}}, int64[1] all = {{-1}}, int64[1] last = {{2}}, int64[3] twice = {{1, {CHOICES}, 1}},
     int64[2] entries = {{-1, {WIDTH}}}, int64[3] apart = {{-1, {CHOICES}, {WIDTH}}}> {{
{body}
  [head] y = MatMul(l{layers}_in, head_weight)
}}"""
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"first_weight": (WIDTH, WIDTH), "head_weight": (WIDTH, 4)}
    for k in range(layers):
        shapes |= {
            f"l{k}_router_weight": (WIDTH, EXPERTS),
            f"l{k}_up_weight": (EXPERTS, WIDTH, INNER),
            f"l{k}_bias": (EXPERTS, INNER),
            f"l{k}_down_weight": (EXPERTS, INNER, WIDTH),
        }
    for name, shape in shapes.items():
        proto.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape, np.float32) / 2, name))
    return proto


def batches(*sizes: int) -> list[dict[str, Array]]:
    found = []
    for size in sizes:
        random = np.random.default_rng(size)
        found.append({"x": random.standard_normal((size, WIDTH)).astype(np.float32)})
    return found


def kinds(program: Complete) -> Counter[str]:
    return Counter(event.op_type for event in program.events)
