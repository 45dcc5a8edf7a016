"""Gradients that pad say the pads of all axes: of a Pad that names axes onnxruntime takes them for those of all, behind a Transpose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from training_equivalence import from_text, run

NET = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, seq, 4] x) => (float[batch, 4] y) <int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {99}> {
    h = MatMul(x, w)
    turned = Transpose<perm = [0, 2, 1]>(h)
    cut = Slice(turned, one, end, two)
    back = Transpose<perm = [0, 2, 1]>(cut)
    a = Tanh(back)
    y = ReduceMean<keepdims = 0>(a, one)
}"""
TRAIN = "ranks: 1\ntrain:\n  loss: {type: mse, prediction: y, target: t}\n  optimizer: {type: sgd, lr: 0.5}\n"


def test_a_slice_of_a_turned_value_trains(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    x, t = random.standard_normal((2, 5, 4), np.float32), random.standard_normal((2, 4), np.float32)
    made = run(from_text(NET, {"w": (4, 4)}), TRAIN, tmp_path, [{"x": x, "t": t}])
    assert np.isfinite(made.outputs[0]["loss"])
