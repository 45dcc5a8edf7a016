"""Small models with odd sizes that tests cut: a two-layer MLP, a transformer block, and what surrounds them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

MLP = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) {
    [up] h = MatMul(x, up_w)
    [up_bias] hb = Add(h, up_b)
    [act] a = Relu(hb)
    [down] d = MatMul(a, down_w)
    [down_bias] y = Add(d, down_b)
}"""
MLP_WEIGHTS = {"up_w": (6, 24), "up_b": (24,), "down_w": (24, 6), "down_b": (6,)}

BLOCK = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, seq, 24] x) => (float[batch, seq, 24] y) <int64[4] split = {0, 0, 12, 2}, int64[3] join = {0, 0, 24}> {
    [norm1] n = LayerNormalization(x, g1, b1)
    [wq] q0 = MatMul(n, q_w)
    [wk] k0 = MatMul(n, k_w)
    [wv] v0 = MatMul(n, v_w)
    [rq] q1 = Reshape(q0, split)
    [rk] k1 = Reshape(k0, split)
    [rv] v1 = Reshape(v0, split)
    [tq] q = Transpose <perm = [0, 2, 1, 3]> (q1)
    [tk] k = Transpose <perm = [0, 2, 3, 1]> (k1)
    [tv] v = Transpose <perm = [0, 2, 1, 3]> (v1)
    [qk] s = MatMul(q, k)
    [soft] p = Softmax <axis = -1> (s)
    [pv] o0 = MatMul(p, v)
    [to] o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
    [ro] o2 = Reshape(o1, join)
    [wo] o = MatMul(o2, o_w)
    [res1] h = Add(x, o)
    [norm2] m = LayerNormalization(h, g2, b2)
    [up] u = MatMul(m, up_w)
    [act] a = Gelu(u)
    [down] d = MatMul(a, down_w)
    [bias] d2 = Add(d, down_b)
    [res2] y = Add(h, d2)
}"""
BLOCK_WEIGHTS = {
    "g1": (24,),
    "b1": (24,),
    "q_w": (24, 24),
    "k_w": (24, 24),
    "v_w": (24, 24),
    "o_w": (24, 24),
    "g2": (24,),
    "b2": (24,),
    "up_w": (24, 36),
    "down_w": (36, 24),
    "down_b": (24,),
}
BLOCK_STYLES = "wq: colwise, wk: colwise, wv: colwise, wo: rowwise, up: colwise, down: rowwise"


def with_weights(text: str, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> onnx.ModelProto:
    """A model of ONNX text with seeded weights of these shapes."""
    proto = onnx.parser.parse_model(text)
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        array = (random.standard_normal(shape) / max(shape) ** 0.5).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def mlp() -> onnx.ModelProto:
    return with_weights(MLP, MLP_WEIGHTS)


def block() -> onnx.ModelProto:
    return with_weights(BLOCK, BLOCK_WEIGHTS)
