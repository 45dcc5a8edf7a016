"""Sessions of a training round alike whatever onnxruntime finds around their nodes: ranks that have copies of one value make the same bits.

Of two ranks that compute the same, one may send a value between, or have another segment begin there, and one may have a constant where
the other has an input of the same number. What onnxruntime fuses depends on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser
from partc.runtime.devices.devices import HOST
from partc.runtime.program.ort import new_session

PATTERNS = {
    "scores": "(T[4, 6, 8] a, T[4, 8, 6] b, T s) => (T[4, 6, 6] y) { t = Mul(a, s) u = Mul(b, s) y = MatMul(t, u) }",
    "scores over a number": "(T[4, 6, 8] a, T[4, 8, 6] b, T s) => (T[4, 6, 6] y) { t = MatMul(a, b) y = Div(t, s) }",
    "a reciprocal": "(T[4, 6] a, T[4, 6] b, T s) => (T[4, 6] y) { t = Div(s, a) y = Mul(t, b) }",
    "a linear layer": "(T[3, 5, 16] a, T[16, 8] b, T[8] s) => (T[3, 5, 8] y) { t = MatMul(a, b) y = Add(t, s) }",
    "a linear layer of rows": "(T[5, 16] a, T[16, 8] b, T[8] s) => (T[5, 8] y) { t = MatMul(a, b) y = Add(t, s) }",
    "a product and a sum": "(T[5, 16] a, T[16, 8] b, T[5, 8] s) => (T[5, 8] y) { t = Gemm(a, b) y = Add(t, s) }",
    "a transposed factor": """(T[3, 16, 5] a, T[3, 8, 16] b) => (T[3, 5, 8] y) {
        t = Transpose <perm = [0, 2, 1]> (a) u = Transpose <perm = [0, 2, 1]> (b) y = MatMul(t, u)
    }""",
    "a sum of a transposed": """(T[3, 16, 5] a) => (T[3, 16] y) <int64[1] at = {1}> {
        t = Transpose <perm = [0, 2, 1]> (a) y = ReduceSum <keepdims = 0> (t, at)
    }""",
    "a mean of a transposed": """(T[3, 16, 5] a) => (T[3, 16] y) <int64[1] at = {1}> {
        t = Transpose <perm = [0, 2, 1]> (a) y = ReduceMean <keepdims = 0> (t, at)
    }""",
    "gelu": "(T[4, 64] a, T h, T o, T r) => (T[4, 64] y) { t = Div(a, r) u = Erf(t) v = Add(u, o) w = Mul(a, v) y = Mul(w, h) }",
    "silu": "(T[4, 64] a) => (T[4, 64] y) { t = Sigmoid(a) y = Mul(a, t) }",
    "softmax": "(T[4, 6, 16] a, T[4, 6, 16] b) => (T[4, 6, 16] y) { t = Add(a, b) y = Softmax <axis = -1> (t) }",
    "a layer norm": """(T[4, 64] a, T[64] g, T[64] s, T e, T two) => (T[4, 64] y) <int64[1] at = {-1}> {
        m = ReduceMean(a, at) d = Sub(a, m) q = Pow(d, two) v = ReduceMean(q, at) w = Add(v, e) r = Sqrt(w) n = Div(d, r)
        o = Mul(n, g) y = Add(o, s)
    }""",
    "a norm of squares": """(T[4, 64] a, T[64] g, T e, T two) => (T[4, 64] y) <int64[1] at = {-1}> {
        q = Pow(a, two) v = ReduceMean(q, at) w = Add(v, e) r = Sqrt(w) n = Div(a, r) y = Mul(n, g)
    }""",
    "a norm of a sum": "(T[4, 64] a, T[4, 64] b, T[64] g, T[64] s) => (T[4, 64] y) { t = Add(a, b) y = LayerNormalization(t, g, s) }",
    "a convolution": """(T[2, 8, 9, 9] a, T[16, 8, 3, 3] b, T[16] s, T[2, 16, 7, 7] c) => (T[2, 16, 7, 7] y) {
        t = Conv(a, b, s) u = Add(t, c) y = Relu(u)
    }""",
}
WITHOUT_DOUBLE = {"gelu", "a convolution"}


def models(base: ModelProto, given: dict[str, np.ndarray]) -> Iterator[ModelProto]:
    """The model with each value of its own as an output beside, and each number among its inputs as a constant."""
    inner = [name for node in base.graph.node for name in node.output if name != "y"]
    numbers = [name for name, value in given.items() if not value.ndim]
    for exposed, fixed in product(
        [[], inner, *([name] for name in inner)], [[], numbers, *([name] for name in numbers)]
    ):
        model = onnx.ModelProto()
        model.CopyFrom(base)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in exposed)
        model.graph.initializer.extend(numpy_helper.from_array(given[name], name) for name in fixed)
        for one in [one for one in model.graph.input if one.name in fixed]:
            model.graph.input.remove(one)
        yield model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in PATTERNS
        for kind in ("float", "double")
        if kind == "float" or name not in WITHOUT_DOUBLE
    ],
)
def test_nodes_round_as_they_would_alone(name: str, kind: str) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 21]> m {PATTERNS[name]}'
    base = parser.parse_model(text.replace("T[", f"{kind}[").replace("T ", f"{kind} "))
    random = np.random.default_rng(1)
    given = {}
    for one in base.graph.input:
        shape = [dim.dim_value for dim in one.type.tensor_type.shape.dim]
        value = random.standard_normal(shape) if shape else {"two": 2.0}.get(one.name, 0.7071067811865476)
        given[one.name] = np.asarray(value, np.float32 if kind == "float" else np.float64)
    made = set()
    for model in models(base, given):
        session = new_session(model.SerializeToString(), 1, HOST, {}, exact=True)
        made.add(session.run(["y"], {one.name: given[one.name] for one in model.graph.input})[0].tobytes())
    assert len(made) == 1
