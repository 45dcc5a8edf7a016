"""Weights learned from a loss are those of the whole, on one rank, whatever of batch and classes is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from dealt import dealt
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from rows import of_today
from training_equivalence import run_whole, train_whole, trained

LANGUAGE = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch, 5] ids) => (float[batch, 5, 6] y)
<float[6, 4] table = {TABLE}, float[6] bias = {0, 1, 0, -1, 0, 1}> {
    [look_up] x = Gather(table, ids)
    [turned] turned = Transpose<perm = [1, 0]>(table)
    [head] logits = MatMul(x, turned)
    [shift] y = Add(logits, bias)
}"""
CLASSES = "type: softmax_cross_entropy, logits: y, labels: t"
WEIGHTS = "weights: [0.5, 2.0, 0.25, 1.5, 3.0, 1.0]"
PLANS = {
    "batch": "ranks: 3\nsymbols: {batch: {divisor: 3}}\ndataset: data_parallel\n",
    "vocabulary": "ranks: 3\nsharding: {head: colwise}\n",
    "both": """ranks: 6
mesh: {dp: 3, tp: 2}
symbols: {batch: {divisor: 3}}
dataset: {ids: [dp, null], t: [dp, null]}
sharding: {head: colwise}
""",
}


def source() -> Source:
    numbers = np.random.default_rng(3).normal(size=24)
    text = LANGUAGE.replace("TABLE", ", ".join(f"{one:.4f}" for one in numbers))
    return Source(from_proto(onnx.parser.parse_model(text), Path("model.onnx")))


OPTIONS = [
    "",
    f"{WEIGHTS}, ignore_index: 2",
    "label_smoothing: 0.1",
    f"{WEIGHTS}, label_smoothing: 0.2, reduction: sum",
]


@pytest.mark.parametrize(
    ("options", "cut"), [*((one, "both") for one in OPTIONS), *of_today(dealt(OPTIONS, ["batch", "vocabulary"]), 1)]
)
def test_what_is_learned_is_that_of_the_whole(options: str, cut: str, tmp_path: Path) -> None:
    loss = f"{{{CLASSES}{', ' if options else ''}{options}}}"
    train = f"train: {{loss: {loss}, optimizer: {{type: sgd, lr: 0.1}}, metrics: [accuracy]}}\n"
    rng = np.random.default_rng(5)
    steps: list[dict[str, Any]] = [{name: rng.integers(0, 6, (n, 5)) for name in ("ids", "t")} for n in (6, 3)]
    plan = PLANS[cut] + train
    alone = run_whole(source(), train_whole(plan), steps)
    have, learned, _ = trained(source(), plan, tmp_path / "cut", steps)
    for mine, whole in zip(have, alone.outputs, strict=True):
        np.testing.assert_allclose(mine["loss"], whole["loss"], rtol=1e-5)
        np.testing.assert_allclose(mine["accuracy"], whole["accuracy"], rtol=1e-6)
    for name, whole in alone.after.items():
        np.testing.assert_allclose(learned[name], whole, rtol=1e-5, atol=1e-6)
