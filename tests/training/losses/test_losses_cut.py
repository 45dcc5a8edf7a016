"""Losses and metrics of a cut batch and of cut classes are those of the whole, and only numbers a position or scalars are reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from dealt import dealt
from equivalence import model, same_as_whole
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.plan.training.losses import Loss
from partc.compiler.training.add_training import add_loss, add_metric
from plan_values import loss, metric
from rows import of_today

RANDOM = np.random.default_rng(13)
WEIGHTS = [0.5, 2.0, 0.25, 1.5, 3.0, 1.0]
IMAGES = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6, 3] x) => (float[batch, 6, 3] y) {
    [double] y = Add(x, x)
}"""
ROWS = IMAGES.replace("6, 3]", "6]")
LANGUAGE = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 5, 4] x) => (float[batch, 5, 6] y)
<float[4, 6] w = {RANDOM}> {
    [head] y = MatMul(x, w)
}""".replace("RANDOM", ", ".join(f"{one:.3f}" for one in RANDOM.normal(size=24)))
CROSS_ENTROPY = {"type": "softmax_cross_entropy", "logits": "y", "labels": "t"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weights": WEIGHTS},
    {"ignore_index": 2},
    {"label_smoothing": 0.1},
    {"weights": WEIGHTS, "ignore_index": -1, "label_smoothing": 0.2},
    {"weights": WEIGHTS, "reduction": "sum"},
]


def with_loss(text: str, this: Loss, metrics: Sequence[str] = ()) -> Any:
    """A model with a loss and metrics, and no other outputs."""
    whole = from_proto(model(text), Path("model.onnx"))
    made = add_loss(whole, this)
    measured = [add_metric(whole, name, metric(name, {}), of=this) for name in metrics]
    whole.graph.outputs[:] = [made, *measured]
    return ir.to_proto(whole)


def labels(*shape: int, ignored: int | None = None) -> np.ndarray:
    found = RANDOM.integers(0, 6, shape)
    if ignored is not None:
        found.ravel()[: found.size // 2 : 2] = ignored
    return found


def plan(ranks: int, more: str = "dataset: data_parallel\n") -> str:
    return f"ranks: {ranks}\nsymbols: {{batch: {{divisor: {ranks}}}}}\n{more}"


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.normal(0, 2, shape).astype(np.float32)


@pytest.mark.parametrize(("options", "ranks"), of_today(dealt(OPTIONS, [2, 3]), 3), ids=str)
def test_a_cut_batch_has_the_loss_of_the_whole(options: Mapping[str, Any], ranks: int) -> None:
    ignored = options.get("ignore_index")
    for text, axis, shape in ((ROWS, 1, (6, 6)), (IMAGES, 1, (6, 6, 3))):
        proto = with_loss(text, loss({**CROSS_ENTROPY, **options, "axis": axis}), ["accuracy", "top_k"])
        steps = [{"x": numbers(*shape), "t": labels(shape[0], *shape[2:], ignored=ignored)} for _ in range(2)]
        program = same_as_whole(proto, plan(ranks), *steps, rtol=2e-6, atol=1e-6)
        assert {event.shape for event in program.events} <= {()}
        assert set(Counter(event.op_type for event in program.events)) <= {"AllReduce", "Reduce", "Exchange"}


KINDS = ["mean_squared", "l1", "binary_cross_entropy", "pos_weight", "probabilities"]


@pytest.mark.parametrize(("kind", "cut"), of_today(dealt(KINDS, [(2, "mean"), (3, "sum"), (3, "mean"), (2, "sum")]), 2))
def test_losses_of_numbers_do_not_see_the_cut(kind: str, cut: tuple[int, str]) -> None:
    ranks, reduction = cut
    names = {"prediction": "y", "target": "t"} if kind in ("mean_squared", "l1") else {"logits": "y", "labels": "t"}
    more: dict[str, Any] = {
        "pos_weight": {"type": "binary_cross_entropy", "pos_weight": [2.0, 1.0, 0.5]},
        "probabilities": {"type": "softmax_cross_entropy", "probabilities": True, "axis": 1, "weights": WEIGHTS},
    }.get(kind, {})
    metrics = ["accuracy"] if kind == "probabilities" else ["mse", "mae"]
    options = {"type": kind, "reduction": reduction, **names, **more}
    proto = with_loss(IMAGES, loss(options), metrics)
    steps = [{"x": numbers(n, 6, 3), "t": RANDOM.uniform(0, 1, (n, 6, 3)).astype(np.float32)} for n in (6, 12)]
    program = same_as_whole(proto, plan(ranks), *steps, rtol=2e-6, atol=1e-6)
    assert {event.shape for event in program.events} <= {()}


@pytest.mark.parametrize(("options", "ranks"), of_today(dealt(OPTIONS, [2, 3]), 3), ids=str)
def test_a_cut_vocabulary_moves_numbers_a_position(options: Mapping[str, Any], ranks: int) -> None:
    """Each rank has its part of the logits; what is joined has no dim of classes."""
    ignored = options.get("ignore_index")
    proto = with_loss(LANGUAGE, loss({**CROSS_ENTROPY, **options}), ["accuracy", "top_k"])
    steps = [{"x": numbers(n, 5, 4), "t": labels(n, 5, ignored=ignored)} for n in (3, 2)]
    program = same_as_whole(proto, f"ranks: {ranks}\nsharding: {{head: colwise}}\n", *steps, rtol=2e-6, atol=1e-6)
    assert {event.shape for event in program.events} <= {(), ("batch", 5, 1)}
    assert {event.op_type for event in program.events} == {"AllReduce"}


def test_batch_and_vocabulary_cut_together() -> None:
    text = "ranks: 6\nmesh: {dp: 2, tp: 3}\nsymbols: {batch: {divisor: 2}}\ndataset: {x: [dp, null, null], t: [dp, null]}\n"
    proto = with_loss(LANGUAGE, loss({**CROSS_ENTROPY, "weights": WEIGHTS, "ignore_index": 0}), ["accuracy"])
    steps = [{"x": numbers(n, 5, 4), "t": labels(n, 5, ignored=0)} for n in (4, 2)]
    program = same_as_whole(proto, f"{text}sharding: {{head: colwise}}\n", *steps, rtol=2e-6, atol=1e-6)
    assert {event.shape for event in program.events} <= {(), ("batch/2", 5, 1)}
