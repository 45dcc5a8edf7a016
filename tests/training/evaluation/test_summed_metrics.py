"""Metrics that are made of sums: those of sklearn's definitions, the same however records are dealt out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from partc.runtime.artifact.training.metric_formula import Undefined, expression, formula, json_numbers
from partc.runtime.checker.check import check_artifact
from rows import of_today
from trainer_case import on_all
from training_equivalence import from_text

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x, float[B] t, int64[B] kind) => (float[B, 5] y, float[B] z, float hits, float number) <float[6, 5] w, float[6] v> {
    y = MatMul (x, w)
    z = MatMul (x, v)
    zero = Constant <value = float {0.0}> ()
    above = Greater (z, zero)
    ones = Cast <to = 1> (above)
    hits = ReduceSum <keepdims = 0> (ones)
    same = Equal (t, t)
    all = Cast <to = 1> (same)
    number = ReduceSum <keepdims = 0> (all)
}
"""
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: kind, ignore_index: 4}
  optimizer: {type: sgd, lr: 0.1}
  metrics:
    perplexity:
    macro: {type: f1}
    table: {type: confusion}
    of_two: {type: confusion, positive: 2}
    of_clicks: {type: confusion, logits: z, labels: t, threshold: 0.6}
    second: {type: precision, positive: 1}
    found: {type: recall, positive: 1}
    clicked: {type: f1, logits: z, labels: t, threshold: 0.6, ignore_index: -1}
    r2: {prediction: z, target: t}
    share: {type: formula, of: [hits, number], expression: "100 * hits / number"}
"""
PLANS = {
    1: "ranks: 1\n",
    2: "ranks: 2\ndataset: data_parallel\nsymbols: {B: {divisor: 4}}\n",
}


def expected(x: np.ndarray, t: np.ndarray, kind: np.ndarray, w: np.ndarray, v: np.ndarray) -> dict[str, float]:
    y, z = (x.astype(np.float64) @ one for one in (w, v))
    counts = kind != 4
    losses = np.log(np.exp(y).sum(1)) - y[np.arange(len(y)), kind]
    predicted = y.argmax(1)

    def f1(label: np.ndarray, guess: np.ndarray) -> tuple[float, float, float]:
        hits = (label & guess).sum()
        precision, recall = hits / max(guess.sum(), 1), hits / max(label.sum(), 1)
        return precision, recall, 2 * hits / max(guess.sum() + label.sum(), 1)

    of = [f1(kind[counts] == one, predicted[counts] == one) for one in range(5)]
    there = [one for one in range(5) if (kind[counts] == one).any() or (predicted[counts] == one).any()]
    return {
        "perplexity": float(np.exp(losses[counts].mean())),
        "macro": float(np.mean([of[one][2] for one in there])),
        "table": float((kind == predicted)[counts].mean()),
        "of_two": float(((kind == 2) == (predicted == 2))[counts].mean()),
        "of_clicks": float(((t == 1) == (1 / (1 + np.exp(-z)) > 0.6)).mean()),
        "second": of[1][0],
        "found": of[1][1],
        "clicked": f1(t == 1, 1 / (1 + np.exp(-z)) > 0.6)[2],
        "r2": 1 - ((z - t) ** 2).sum() / ((t - t.mean()) ** 2).sum(),
        "share": 100 * (z > 0).mean(),
    }


@pytest.mark.parametrize("ranks", of_today([*PLANS], 1))
def test_they_are_of_all_records(ranks: int, tmp_path: Path) -> None:
    source = from_text(MODEL, {"w": (6, 5), "v": (6,)})
    weights = source.model.graph.initializers
    w, v = (weights[one].const_value.numpy() for one in ("w", "v"))
    compile_source(source, parse_plan(PLANS[ranks] + TRAIN + "  accumulate: 2\n" * (ranks > 1), "plan.yaml"), tmp_path)
    assert check_artifact(tmp_path) == []
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 6)).astype(np.float32)
    t, kind = (rng.random(40) < 0.5).astype(np.float32), rng.integers(0, 5, 40)
    kind[[0, 1, 2]] = 4

    def act(trainer: Trainer) -> dict[str, float]:
        def mine(begin: int, end: int) -> dict[str, np.ndarray]:
            each = (end - begin) // ranks
            rows = slice(begin + each * trainer.rank, begin + each * (trainer.rank + 1))
            return {"x": x[rows], "t": t[rows], "kind": kind[rows]}

        found = trainer.evaluate([(mine(0, 24), 24), (mine(24, 40), 16)])
        if trainer.rank == 0:
            assert trainer.train(mine(0, 40))["macro"] == pytest.approx(found["macro"], abs=1e-6)
        else:
            trainer.train(mine(0, 40))
        return found

    found = on_all(tmp_path, ranks, act)[0]
    wanted = expected(x, t, kind, w, v)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    told = json_numbers(found)
    y = x.astype(np.float64) @ w
    table = np.zeros((5, 5), int)
    np.add.at(table, (kind[kind != 4], y.argmax(1)[kind != 4]), 1)
    assert np.array_equal(np.array(told["table"]), table)
    right = table[2, 2]
    assert told["of_two"] == {
        "true_negatives": table.sum() - table[2].sum() - table[:, 2].sum() + right,
        "false_positives": table[:, 2].sum() - right,
        "false_negatives": table[2].sum() - right,
        "true_positives": right,
    }


def test_formulas_without_a_value() -> None:
    for name, sums in (
        ("perplexity", [0, 0]),
        ("f1", [0] * 9),
        ("confusion", [0] * 4),
        ("r2", [1, 2, 2, 2]),
        ("=a,b: log(a) / b", [1, 0]),
    ):
        assert isinstance(formula(name).number(np.array(sums, np.float64)), Undefined), name
    assert formula("=a,b: -sqrt(a) + 2 ** b").number(np.array([9.0, 3.0])) == 5.0
    assert formula("precision").number(np.array([3.0, 1, 9])) == 0.75
    for text in ("a.b", "__import__('os')", "a if b else a", "c", "a +"):
        with pytest.raises(ValueError, match="is not"):
            expression(text, ("a", "b"))


def test_what_is_no_sum_is_told(tmp_path: Path) -> None:
    """The largest number of a batch does not follow, by adding, from those of its microbatches."""
    text = MODEL.replace("float number)", "float number, float largest)").replace(
        "    number = Re", "    largest = ReduceMax <keepdims = 0> (y)\n    number = Re"
    )
    train = TRAIN.replace("    perplexity:\n", "    perplexity:\n    largest:\n")
    plan = parse_plan(PLANS[1] + train + "  accumulate: 2\n", "plan.yaml")
    report = compile_source(from_text(text, {"w": (6, 5), "v": (6,)}), plan, tmp_path)
    (warning,) = report.warnings
    assert warning == "with `accumulate: 2` these are means over the parts of a batch, and not of all of it: largest"
