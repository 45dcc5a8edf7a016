"""A trained model with an If and a Loop, in which bodies read parameters, and its plans and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
TRAINED = (
    HEAD
    + """net (float[batch, 4] x, bool deep) => (float[batch, 3] y)
<float[4, 5] w1 = {W1}, float[5, 3] w2 = {W2}, float[4, 3] skip = {W3}, float[3] bias = {0, 1, -1},
 int64 three = {3}, bool yes = {1}> {
    [up] h = MatMul(x, w1)
    BRANCH
    [shift] y = Add(b, bias)
}"""
)
LOOPED = """[wide] s0 = MatMul(x, skip)
    [across] d = MatMul(h, w2)
    [pick] b = Loop <body = turn (int64 i, bool on, float[batch, 3] a) => (bool more, float[batch, 3] after) {
        more = Identity(on)
        p = Mul(a, bias)
        q = Add(p, d)
        after = Tanh(q) }> (three, yes, s0)"""
TRAIN = """train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: momentum, lr: 0.2, momentum: 0.9}
"""
PLANS = {
    "data parallel": "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n",
    "placed": "ranks: 3\nplacement: {pick: 1, shift: 2}\n",
    "a group": "ranks: 2\nmesh: {tp: 2}\nplacement: {pick: [0, 1]}\nsharding: {shift: {in: [[1, 1], [1]]}}\n",
}


def trained_source(branch: str) -> Source:
    text, rng = TRAINED.replace("BRANCH", branch), np.random.default_rng(1)
    for name, count in (("W1", 20), ("W2", 15), ("W3", 12)):
        text = text.replace(name, "{" + ", ".join(f"{one:.4f}" for one in rng.normal(size=count)) + "}")
    text = text.replace("{{", "{").replace("}}", "}")
    return Source(from_proto(onnx.parser.parse_model(text), Path("model.onnx")))


def steps() -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    return [
        {"x": rng.normal(size=(6, 4)).astype(np.float32), "label": rng.integers(0, 3, 6), "deep": np.array(k % 3 != 1)}
        for k in range(5)
    ]
