"""CONTRIBUTING.md's diffs of a loss, a metric and a plan key are all that these need: ranks learn, measure and decay as the whole does."""

from __future__ import annotations

from pathlib import Path

from contributing import followed, output_of

BEGIN = r"""
import sys
from pathlib import Path
sys.path += ["tests/support"]
import numpy as np
import partc.compiler
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.onnx_file import from_proto
from small_training import with_numbers, PERCEPTRON
from training_equivalence import run, same_training

assert partc.compiler.__file__.startswith(sys.argv[1]), partc.compiler.__file__
rng = np.random.default_rng(5)
steps = [{"x": rng.normal(size=(12, 6)).astype("f"), "t": rng.normal(size=(12, 3)).astype("f")} for _ in range(3)]
PLANS = {
    "batch": "ranks: 3\nsymbols: {batch: {divisor: 12}}\ndataset: data_parallel\n",
    "columns": "ranks: 3\nsharding: {two: {in: [[1, 1], [1, 3]]}}\n",
    "microbatches": "ranks: 2\nsymbols: {batch: {divisor: 12}}\nplacement: {one: 0, plus: 0, turn: 0, two: 1}\n"
    "pipeline: {microbatches: 3, schedule: 1f1b}\n",
}

def source():
    return Source(from_proto(with_numbers(PERCEPTRON), Path("model.onnx")))

def check(train):
    for name, plan in PLANS.items():
        same_training(source, plan + train, Path(sys.argv[1]) / str(len(train)) / name, steps, rtol=1e-5, atol=1e-4)
    return run(source(), "ranks: 1\n" + train, Path(sys.argv[1]) / str(len(train)) / "one", steps)

def prediction(tensors, x):
    return np.tanh(x @ tensors["first"] + tensors["shift"]) @ tensors["second"]
"""
PARTS = {
    "loss": r"""
found = check("train: {loss: {type: logcosh, prediction: y, target: t, width: 0.5}, optimizer: {type: sgd, lr: 0.1}}\n")
off = (prediction(found.before, steps[0]["x"]) - steps[0]["t"]) / 0.5
np.testing.assert_allclose(found.outputs[0]["loss"], np.log(np.cosh(off)).mean(), rtol=1e-5)
""",
    "metric": r"""
from partc.runtime.artifact.training.metric_formula import FORMULAS

found = check("train: {loss: {type: l1, prediction: y, target: t}, metrics: [rmse], optimizer: {type: sgd, lr: 0.1}}\n")
off = prediction(found.before, steps[0]["x"]) - steps[0]["t"]
np.testing.assert_allclose(FORMULAS["root_mean"].number(found.outputs[0]["rmse"]), np.sqrt((off**2).mean()), rtol=1e-5)
""",
    "key": r"""
train = "train: {loss: {type: l1, prediction: y, target: t}, optimizer: {type: adamw, lr: 0.1, weight_decay: 0.3}, KEY}\n"
found = check(train.replace("KEY", "decay_vectors: false"))
said = check(train.replace("KEY", "parameters: {shift: {weight_decay: 0}}"))
for name, value in said.after.items():
    np.testing.assert_array_equal(found.after[name], value)
""",
}


def test_each_is_a_class_or_a_field(tmp_path: Path) -> None:
    """One process for all three: each begins with the imports of a compile."""
    copy = followed(tmp_path, "Add a loss", "Add a metric", "Add a plan key")
    output_of(copy, "-c", BEGIN + "\n".join(PARTS.values()), str(copy.parent))
