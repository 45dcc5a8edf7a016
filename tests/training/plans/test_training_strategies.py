"""A training takes the strategies that inference takes, also of ops that it makes others of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from rows import of_today
from training_equivalence import from_text, same_training

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
m (float[8, 4] x) => (float[8, 6] y)
<float[4] mean = {0.5, 0, 0.25, 1}, float[4] variance = {1, 0.5, 0.75, 2}, float ratio = {0.25}> {
    [bn] n = BatchNormalization (x, scale, bias, mean, variance)
    [drop] d, mask = Dropout (n, ratio)
    [mm] y = MatMul (d, w) }"""
TRAIN = "train:\n  loss: {type: mean_squared, prediction: y, target: t}\n  optimizer: {type: sgd, lr: 0.1}\n"
STRATEGIES = {
    "bn": [
        "{in: [[2, 1]]}",
        "{in: [[2, 1], null, null, null, null]}",
        "{in: [[1, 2], [2], [2], [2], [2]]}",
        "{in: [null, [2], null, null, null]}",
        "{out: [[2, 1]]}",
    ],
    "drop": [
        "{in: [[2, 1]]}",
        "{in: [[2, 1], null]}",
        "{in: [[1, 2], []]}",
        "{out: [[2, 1], null]}",
        "{out: [[2, 1]]}",
    ],
}


def source() -> Source:
    return from_text(TEXT, {"scale": (4,), "bias": (4,), "w": (4, 6)})


@pytest.mark.parametrize(
    ("node", "strategy"), of_today([(node, one) for node, some in STRATEGIES.items() for one in some], 4)
)
def test_a_training_takes_what_inference_takes(node: str, strategy: str, tmp_path: Path) -> None:
    plan = f"ranks: 2\nsharding:\n  {node}: {strategy}\n"
    compile_source(source(), parse_plan(plan, "plan.yaml"), tmp_path / "inference")
    rng = np.random.default_rng(5)
    steps = [{"x": rng.standard_normal((8, 4), np.float32), "t": rng.standard_normal((8, 6), np.float32)} for _ in "ab"]
    same_training(source, plan + TRAIN, tmp_path, steps, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("train", ["", TRAIN])
@pytest.mark.parametrize(
    ("strategy", "fact"),
    [
        ("drop: {in: [[2, 1], [2]]}", "input 1 is cut"),
        ("bn: {in: [[2, 1], null]}", "the strategy has 2 inputs, but 1 enter: 'x'"),
    ],
)
def test_what_inference_refuses_a_training_refuses(strategy: str, fact: str, train: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=fact):
        compile_source(source(), parse_plan(f"ranks: 2\nsharding: {{{strategy}}}\n{train}", "plan.yaml"), tmp_path)
