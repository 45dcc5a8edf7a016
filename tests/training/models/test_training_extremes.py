"""Extremes along a cut dim train as the unsharded model does: equal elements share the cotangent, also those of several ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from dealt import dealt
from rows import of_today
from training_equivalence import from_text, same_training

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x) => (float y) <float[6, 12] w, float[12, 4] v> {
    h = MatMul (x, w)
    NODES
    back = MatMul (share, v)
    squares = Mul (back, back)
    y = ReduceMean <keepdims = 0> (squares)
}
"""
FORMS = {
    "columns": "axes = Constant <value_ints = [1]> () top = ReduceMax <keepdims = 1> (h, axes) share = Sub (h, top)",
    "columns, no dim kept": """axes = Constant <value_ints = [-1]> () low = ReduceMin <keepdims = 0> (h, axes)
        wide = Unsqueeze (low, axes) share = Mul (h, wide)""",
    "everything": "top = ReduceMax <keepdims = 0> (h) share = Sub (h, top)",
    "one of another": """axes = Constant <value_ints = [1]> () row = ReduceMax <keepdims = 1> (h, axes)
        top = ReduceMin <keepdims = 0> (row) share = Sub (h, top)""",
    "positions": """parts = Constant <value_ints = [0, 3, 2, 2]> () image = Reshape (h, parts) top = GlobalMaxPool (image)
        flat = Constant <value_ints = [0, 12]> () less = Sub (image, top) share = Reshape (less, flat)""",
    "a softmax by hand": """axes = Constant <value_ints = [1]> () top = ReduceMax <keepdims = 1> (h, axes) less = Sub (h, top)
        e = Exp (less) sum = ReduceSum <keepdims = 1> (e, axes) share = Div (e, sum)""",
}
TRAIN = """
train:
  loss: y
  optimizer: {type: sgd, lr: 0.01}
"""
PLANS = {
    "columns over 2": "ranks: 2\nsharding: {MatMul_0: colwise}",
    "columns over 3": "ranks: 3\nsharding: {MatMul_0: colwise}",
    "batch over 2": "ranks: 2\nsymbols: {B: {divisor: 2}}\ndataset: data_parallel",
    "batch and columns": """ranks: 6
mesh: {dp: 2, tp: 3}
symbols: {B: {divisor: 2}}
dataset: data_parallel
sharding: {MatMul_0: colwise}""",
}


@pytest.mark.parametrize(
    ("form", "plan"),
    [
        *((form, "batch and columns") for form in FORMS),
        *of_today(dealt(FORMS, [one for one in PLANS if "and" not in one]), 2),
        ("positions", "columns over 2"),  # the one whose positions are gathered, with a warning
    ],
)
def test_an_extreme_along_a_cut_dim_trains(form: str, plan: str, tmp_path: Path) -> None:
    """Weights and inputs are small integers, so that many elements are equal, on one rank and on several."""
    source = from_text(MODEL.replace("NODES", FORMS[form]), {"w": (6, 12), "v": (12, 4)})
    weight = source.model.graph.initializers["w"]
    assert weight.const_value is not None
    whole = np.sign(np.round(weight.const_value.numpy()))
    weight.const_value = ir.tensor(whole, name="w")
    random = np.random.default_rng(5)
    steps = [{"x": random.integers(-1, 2, (rows, 6)).astype(np.float32)} for rows in (4, 8)]
    same_training(lambda: source, PLANS[plan] + TRAIN, tmp_path, steps, rtol=1e-5, atol=1e-4)


def test_an_extreme_of_an_extreme_whose_shape_the_model_tells(tmp_path: Path) -> None:
    source = from_text(MODEL.replace("NODES", FORMS["one of another"]), {"w": (6, 12), "v": (12, 4)})
    made = {value.name: value for node in source.model.graph for value in node.outputs}
    for name, dims in (("h", ["B", 12]), ("row", ["B", 1])):
        made[name].type, made[name].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(dims)
    steps = [{"x": np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)}]
    same_training(lambda: source, PLANS["columns over 2"] + TRAIN, tmp_path, steps, rtol=1e-5, atol=1e-4)


def test_ranks_reduce_the_extreme_and_the_number_of_equal_elements(tmp_path: Path) -> None:
    """Forward the maximum and the count, backward the cotangent of the extreme; nothing of the size of `h` moves."""
    source = from_text(MODEL.replace("NODES", FORMS["columns"]), {"w": (6, 12), "v": (12, 4)})
    steps = [{"x": np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)}]
    plan = "ranks: 2\nsharding: {MatMul_0: colwise, ReduceMax_0: {in: [[1, 2], null]}, MatMul_1: rowwise}" + TRAIN
    program = same_training(lambda: source, plan, tmp_path, steps, rtol=1e-5, atol=1e-4)
    found = Counter((event.op_type, event.shape) for event in program.events)
    assert found == {("AllReduce", ("B", 1)): 3, ("AllReduce", ("B", 4)): 1}
