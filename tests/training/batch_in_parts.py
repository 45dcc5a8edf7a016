"""A small network, its losses and plans, and how it trains on ranks as threads: what tests of a batch in microbatches compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_trainer
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.tensors.boxes import slices
from partc.runtime.checker.check import check
from partc.runtime.communication.in_process import LocalWorld
from training_equivalence import from_text, kinds_of_today, reference

Trained = tuple[list[dict[str, float]], dict[str, np.ndarray]]
HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
NET = (
    HEAD
    + """m (float[batch, 6] x) => (float[batch, 5] y) <float[6, 8] w, float[8, 5] v, float[5] shift> {
    [up] a = MatMul (x, w)
    [bend] b = Tanh (a)
    [down] c = MatMul (b, v)
    [add] y = Add (c, shift)
}"""
)
WEIGHTS = {"w": (6, 8), "v": (8, 5), "shift": (5,)}
CLASSES = "type: softmax_cross_entropy, logits: y, labels: label"
WEIGHED = "weights: [0.1, 3, 1, 0.5, 2]"
LOSSES = {
    "mean": f"{{{CLASSES}}}",
    "ignored": f"{{{CLASSES}, ignore_index: -1}}",
    "weights": f"{{{CLASSES}, {WEIGHED}}}",
    "both, smoothed": f"{{{CLASSES}, {WEIGHED}, ignore_index: -1, label_smoothing: 0.1}}",
    "sum": f"{{{CLASSES}, {WEIGHED}, reduction: sum}}",
    "squares": "{type: mean_squared, prediction: y, target: t}",
    "sum of squares": "{type: mean_squared, prediction: y, target: t, reduction: sum}",
    "chances": "{type: binary_cross_entropy, logits: y, labels: t}",
}
PLANS = {
    1: "ranks: 1\n",
    2: "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 16}}\n",
    4: (
        "ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 16}}\ndataset: {x: [dp, null], DATA}\n"
        "sharding: {up: {parameters: {w: [null, tp]}}, down: {parameters: {v: [tp, null]}}}\n"
    ),
    5: "ranks: 5\nmesh: {classes: 5}\nsharding: {head: {parameters: {w: [null, classes]}}}\n",
}
MEASURED = "  metrics: {right: {type: accuracy, logits: y, labels: label}, best: {type: top_k, logits: y, labels: label, k: 2}}\n"


def train(loss: str, parts: int, optimizer: str = "{type: sgd, lr: 1.0}", more: str = "") -> str:
    return f"train:\n  loss: {loss}\n  optimizer: {optimizer}\n  accumulate: {parts}\n{more}"


def numbers(loss: str = "label") -> dict[str, np.ndarray]:
    """A batch whose first quarter has no label at all, and the second few."""
    rng = np.random.default_rng(6)
    label = rng.integers(0, 5, 16)
    if "ignore_index" in loss:
        label[:4], label[[5, 6, 9]] = -1, -1
    found = {"x": rng.normal(size=(16, 6)).astype(np.float32)}
    if "label" in loss and "binary" not in loss:
        return found | {"label": label}
    name = "labels" if "labels: t" in loss else "target"
    return found | {
        "t": rng.random((16, 5)).astype(np.float32) if name == "labels" else rng.normal(size=(16, 5)).astype(np.float32)
    }


def trained(folder: Path, source: Source, plan: str, steps: Sequence[Mapping[str, Any]]) -> Trained:
    """What every step gives, and all tensors after the last, whole; the artifact is sound.

    What a compile proves is a part of what is checked here.
    """
    compile_source(source, parse_plan(plan, "plan.yaml"), folder, check=False, kinds=kinds_of_today())
    violations = check(folder).violations
    assert not violations, "\n".join(map(str, violations))
    return stepped(folder, steps)


def _trained_alone(source: Source, plan: str, folder: Path, steps: Sequence[Mapping[str, Any]], **how: Any) -> Trained:
    compile_source(source, parse_plan(plan, "plan.yaml"), folder, **how)
    return stepped(folder, steps)


trained_whole = reference(_trained_alone)
"""What `trained` gives on one rank, by a plan for one."""


def stepped(folder: Path, steps: Sequence[Mapping[str, Any]]) -> Trained:
    """What every step of an artifact gives, and all tensors after the last, whole."""
    ranks = open_artifact(folder).manifest.ranks
    world = LocalWorld(ranks)

    def run(number: int) -> tuple[list[dict[str, Any]], list[Any]]:
        with load_trainer(folder, world.transport(number), threads=1) as trainer:
            given = []
            for step in steps:
                shards = {port.name: shard(step[port.name], port.box(number)) for port in trainer.inputs}
                given.append(trainer.train(shards))
            return given, [
                (record, record.box(number), array.copy()) for record, array in trainer.program.state.arrays()
            ]

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(run, range(ranks)))
    tensors: dict[str, np.ndarray] = {}
    for _, arrays in found:
        for record, box, array in arrays:
            whole = tensors.setdefault(record.tensor, np.zeros(record.shape, array.dtype))
            whole[... if box is None else slices(box, whole.shape)] = array
    return [{name: float(value) for name, value in one.items()} for one in found[0][0]], tensors


def shard(array: np.ndarray, box: Any) -> np.ndarray:
    return array if box is None else array[slices(box, array.shape)]


def close(
    have: tuple[Any, Any], want: tuple[Any, Any], before: dict[str, np.ndarray] | None = None, tolerance: float = 1e-6
) -> None:
    """Outputs within a relative tolerance; of tensors, of the largest element of the change."""
    for one, other in zip(have[0], want[0], strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance / 10)
    for name, array in want[1].items():
        change = np.abs(array - (before or {}).get(name, 0)).max()
        rounding = 1.2e-7 * np.abs(array).max()
        np.testing.assert_allclose(have[1][name], array, rtol=0, atol=tolerance * change + rounding, err_msg=name)


def start_of(weights: Mapping[str, tuple[int, ...]] = WEIGHTS, text: str = NET) -> dict[str, np.ndarray]:
    known = from_text(text, weights).model.graph.initializers.values()
    return {str(one.name): one.const_value.numpy() for one in known if one.const_value is not None}


OWN_LOSS = (
    HEAD
    + """m (float[batch, 6] x, int64[batch] label, float keep) => (float loss, float other)
<float[6, 5] w, float[5] k = {0.1, 3, 1, 0.5, 2}, float small = {0.01}> {
    [head] y = MatMul (x, w)
    ENTROPY
    w2 = Mul (w, w)
    decay = ReduceSum<keepdims = 0> (w2)
    less = Mul (decay, small)
    loss = Add (own, less)
    off = ReduceMean<keepdims = 0> (y)
    kept = Mul (off, keep)
    other = Neg (kept)
}"""
)
LABELLED = {
    "entropy": 'own = SoftmaxCrossEntropyLoss<ignore_index = -1, reduction = "mean"> (y, label, k)',
    "entropy of none": 'own = SoftmaxCrossEntropyLoss<ignore_index = -1, reduction = "mean"> (y, label)',
    "entropy and logs": 'own, logs = SoftmaxCrossEntropyLoss<ignore_index = -1, reduction = "mean"> (y, label, k)',
    "a sum of it": 'own = SoftmaxCrossEntropyLoss<ignore_index = -1, reduction = "sum"> (y, label, k)',
    "likelihood": """l = LogSoftmax<axis = 1> (y)
    own = NegativeLogLikelihoodLoss<ignore_index = -1, reduction = \"mean\"> (l, label, k)""",
    "an even mean of it": """l = LogSoftmax<axis = 1> (y)
    z = Max (label, zero)
    own = NegativeLogLikelihoodLoss<reduction = \"mean\"> (l, z)""",
    "counted": """l = LogSoftmax<axis = 1> (y)
    z = Max (label, zero)
    one = NegativeLogLikelihoodLoss<reduction = \"none\"> (l, z)
    sum = ReduceSum<keepdims = 0> (one)
    size = Shape (label)
    count = Cast<to = 1> (size)
    many = Squeeze (count)
    own = Div (sum, many)""",
}
