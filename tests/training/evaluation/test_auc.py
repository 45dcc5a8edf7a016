"""The area under the ROC curve: near that of ranks, and the same however records are dealt out over batches, microbatches and ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import whole_outputs
from losses_case import model
from partc.cli.job.inputs import InputReader
from partc.cli.main import invoke
from partc.compiler.errors import CompileError
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.training.add_training import add_metric
from partc.runtime import InputError, Trainer
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.training.metric_formula import Undefined, roc_auc
from partc.runtime.checker.check import check_artifact
from plan_values import loss, metric
from trainer_case import TEXT, on_all
from training_equivalence import from_text

CLICKS = TEXT.replace("float[B, 4] y", "float[B, 1] y").replace("float[8, 4] v", "float[8, 1] v")
TRAIN = """
train:
  loss: {type: binary_cross_entropy, logits: y, labels: t}
  optimizer: {type: sgd, lr: 0.1}
  metrics: [auc]
"""
DEALT = "dataset: data_parallel\nsymbols: {B: {divisor: 4}}\n"
STAGES = "symbols: {B: {divisor: 4}}\nplacement: {Tanh_0: 0}\nprecision: {compute: float16}\n"
PLANS = {
    "data parallel": (2, DEALT + TRAIN.replace("[auc]", "[auc, auroc]")),
    "microbatches of stages in 16 bits": (2, STAGES + TRAIN + "  accumulate: 2\n"),
}


def by_ranks(x: np.ndarray, t: np.ndarray) -> float:
    """The share of pairs in order, ties as half, by the ranks of all predictions."""
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    ones = int(t.sum())
    return float((ranks[t == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(t) - ones)))


def counted(options: dict[str, object], x: np.ndarray, t: np.ndarray, kind: int = onnx.TensorProto.FLOAT) -> float:
    """The auc of the model 2 x, by its nodes and the formula."""
    made = model(["batch"], kind)
    out = add_metric(made, "auc", metric("auc", {"labels": "t", **options}))
    found = whole_outputs(ir.to_proto(made), {"x": x, "t": t})["auc"]
    assert found.dtype == np.float32
    assert [*found.shape] == [*(out.shape or ())]
    assert found.sum() == len(x)
    return roc_auc(found.astype(np.float64))


@pytest.mark.parametrize(
    ("mean", "spread", "apart", "share"),
    [(0, 1, 1, 0.4), (-4.6, 1, 1, 0.03), (-7, 1, 1, 0.01), (0, 0.05, 0.05, 0.3), (0, 20, 10, 0.3), (-3, 5, 3, 0.1)],
)
def test_it_is_near_that_of_ranks(mean: float, spread: float, apart: float, share: float) -> None:
    random = np.random.default_rng(5)
    t = (random.random(20000) < share).astype(np.int64)
    x = (mean + spread * random.standard_normal(len(t)) + apart * t).astype(np.float32)
    exact = by_ranks(x, t)
    assert 0.6 < exact < 0.8
    assert counted({"logits": "y"}, x / 2, t) == pytest.approx(exact, abs=1e-3)
    odds = (1 / (1 + np.exp(-x.astype(np.float64))) / 2).astype(np.float32)
    exact = by_ranks(odds, t)
    assert counted({"prediction": "y"}, odds, t) == pytest.approx(exact, abs=1e-3)


def test_ties_ends_and_predictions_without_a_place() -> None:
    t = np.array([0, 1, 0, 1, 1])
    ends = np.array([-np.inf, np.inf, -3e38, 3e38, 0], np.float32)
    assert counted({"logits": "y", "bins": 2}, ends, t) == 1.0
    assert counted({"logits": "y"}, np.zeros(5, np.float32), t) == 0.5
    assert counted({"prediction": "y"}, np.array([0, 0.5, 0, 0.5, 0.25], np.float32), t) == 1.0
    assert counted({"logits": "y"}, ends.astype(np.float64), t, onnx.TensorProto.DOUBLE) == 1.0
    for x, key in (([0, np.nan, 1, 2, 3], "logits"), ([0, 0.6, 0.1, -0.1, np.nan], "prediction")):
        found = counted({key: "y"}, np.array(x, np.float32), t)
        assert isinstance(found, Undefined)
        assert re.match("[13] of 5 predictions are NaN, or no probability", found.reason)
    for label in (0, 1):
        alike = counted({"logits": "y"}, ends, np.full(5, label))
        assert isinstance(alike, Undefined)
        assert alike.reason == f"all 5 labels are {label}"


def records(count: int, seed: int = 1) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, 6)).astype(np.float32)
    return {"x": x, "t": (random.random((count, 1)) < 0.4).astype(np.float32)}


@pytest.mark.parametrize("name", PLANS)
def test_it_is_of_all_records(name: str, tmp_path: Path) -> None:
    ranks, plan = PLANS[name]
    source = from_text(CLICKS, {"w": (6, 8), "v": (8, 1)})
    weights = source.model.graph.initializers
    w, v = (weights[one].const_value.numpy() for one in ("w", "v"))
    compile_source(source, parse_plan(f"ranks: {ranks}\n" + plan, "plan.yaml"), tmp_path / "build", check=False)
    assert check_artifact(tmp_path / "build") == []
    whole, refused = records(28), set[str]()

    def act(trainer: Trainer) -> dict[str, float]:
        port = next(one for one in trainer.ports if one.name == "x")
        dealt = port.boxes is not None

        def mine(begin: int, end: int) -> dict[str, np.ndarray]:
            half = (end - begin) // 2
            rows = (
                slice(begin + trainer.rank * half, begin + trainer.rank * half + half) if dealt else slice(begin, end)
            )
            return {one: array[rows].copy() for one, array in whole.items()}

        measured = trainer.evaluate([(mine(0, 4), 4), (mine(4, 28), 24)])
        wrong = mine(0, 28)
        if dealt and trainer.rank == 1:
            wrong["t"][2] = 0.25
        with pytest.raises(InputError) as caught:
            trainer.train({**wrong, "t": wrong["t"] if dealt else wrong["t"] - 1})
        refused.add(str(caught.value))
        return {**measured, **{f"step {key}": float(one) for key, one in trainer.train(mine(0, 28)).items()}}

    found = on_all(tmp_path / "build", ranks, act)[0]
    exact = by_ranks((np.tanh(whole["x"] @ w) @ v)[:, 0], whole["t"][:, 0])
    assert found["auc"] == pytest.approx(exact, abs=3e-3)
    assert found["step auc"] == found["auc"]
    assert found.get("auroc", found["auc"]) == found["auc"]
    (text,) = refused
    first = np.flatnonzero(whole["t"] == 0)[0]
    label, record = (0.25, 16) if ranks == 2 and "auroc" in found else (-1.0, first)
    assert f"input 't': record {record} of the batch at [0] has the label {label}\n  labels are 0 or 1\n" in text
    assert "or take the metric 'au" in text


def test_it_is_told_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(ir.to_proto(from_text(CLICKS, {"w": (6, 8), "v": (8, 1)}).model), "net.onnx")
    Path("plan.yaml").write_text("ranks: 1\n" + TRAIN + "  batch: 4\n")
    np.savez("d.npz", **records(20))
    np.savez("zeros.npz", **{**records(20), "t": np.zeros((20, 1), np.float32)})
    assert invoke(["compile", "net.onnx", "--plan", "plan.yaml"]) == 0
    both = ["--data", "d.npz", "--test", "zeros.npz", "--metrics", "told.jsonl"]
    assert invoke(["train", "--in-process", "--log", "5", *both]) == 0
    assert "auc undefined (all 20 labels are 0)" in capsys.readouterr().out
    steps, evaluated = map(json.loads, Path("told.jsonl").read_text().splitlines())
    assert evaluated["auc"] is None
    assert 0 < steps["auc"] < 1
    assert invoke(["eval", "--in-process", "--json", "--data", "zeros.npz"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["auc"] is None
    (port,) = [one for one in open_artifact("build").manifest.inputs if one.name == "t"]
    drawn = InputReader({"t": port}, {}, 0, {"B": 50}).read(["t"])["t"]
    assert sorted({*np.ravel(drawn)}) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("options", "of", "message"),
    [
        (
            {},
            {"type": "softmax_cross_entropy", "logits": "y", "labels": "t"},
            "'y' has a score for each of several cla",
        ),
        ({}, {"type": "output", "output": "y"}, "the metric 'auc' lacks logits and labels"),
        ({"bins": 1}, None, "bins: expected at least 2, but got 1"),
        ({"bins": 1 << 20}, None, "bins: expected at most 65536, but got 1048576"),
        ({"logits": "y", "prediction": "y", "labels": "t"}, None, "`logits` and `prediction` are both given"),
    ],
)
def test_what_it_is_not_of(options: dict[str, object], of: dict[str, object] | None, message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)):
        add_metric(model(["batch", 5]), "auc", metric("auc", options), of=None if of is None else loss(of))


def test_it_is_of_floats_and_of_one_for_each_label() -> None:
    with pytest.raises(CompileError, match="the output 'y' is of type INT64"):
        add_metric(model(["batch"], onnx.TensorProto.INT64), "auc", metric("auc", {"logits": "y", "labels": "t"}))
    classes = model(["batch", 5])
    classes.graph.inputs.append(ir.Value(name="t", shape=ir.Shape(["batch"]), type=ir.TensorType(ir.DataType.INT64)))
    with pytest.raises(CompileError, match="has a score for each of several classes"):
        add_metric(classes, "auc", metric("auc", {"logits": "y", "labels": "t"}))
