"""Counts by label and prediction, and the other metrics, as numpy has them: under every plan, in lines, JSON and CSV."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.frontend import load
from rows import of_today
from training_command_case import MODEL, built, folder

__all__ = ["folder"]

CLASSES = 6
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label, ignore_index: 5}
  optimizer: {type: sgd, lr: 0.1}
  metrics:
    confusion:
    third: {type: confusion, positive: 2}
    top2: {type: top_k, k: 2}
    perplexity:
    precision:
    recall:
    f1:
    mae: {prediction: y, target: wanted}
    r2: {prediction: y, target: wanted}
  data: data.npz
  test: data.npz
  batch: 24
  shuffle: false
  steps: 1
  log: 1
"""
DATA_PARALLEL = "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: DIVISOR}}\n"
PLANS = {
    "one": "ranks: 1\n" + TRAIN,
    "dp": DATA_PARALLEL.replace("DIVISOR", "2") + TRAIN,
    "accumulated": DATA_PARALLEL.replace("DIVISOR", "6") + TRAIN + "  accumulate: 3\n",
    "tp": "ranks: 2\nsharding: {a: colwise, b: rowwise}\n" + TRAIN,
    "pipeline": "ranks: 2\nplacement: {a: 0, b: 1}\nsymbols: {batch: {divisor: 4}}\npipeline: {microbatches: 4, schedule: 1f1b}\n" + TRAIN,
}  # fmt: skip


def by_numpy(y: np.ndarray, label: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """The metrics of some records; of label 5 nothing is counted."""
    counts = label != 5
    table = np.zeros((CLASSES, CLASSES), int)
    np.add.at(table, (label[counts], y.argmax(1)[counts]), 1)
    hits = np.diagonal(table)
    precision, recall = hits / np.maximum(table.sum(0), 1), hits / np.maximum(table.sum(1), 1)
    f1 = 2 * hits / np.maximum(table.sum(0) + table.sum(1), 1)
    there = table.sum(0) + table.sum(1) > 0
    logs = y[np.arange(len(y)), label] - np.log(np.exp(y).sum(1))
    place = (y >= y[np.arange(len(y)), label][:, None]).sum(1)
    third = {
        "true_negatives": int(np.delete(np.delete(table, 2, 0), 2, 1).sum()),
        "false_positives": int(table[:, 2].sum() - hits[2]),
        "false_negatives": int(table[2].sum() - hits[2]),
        "true_positives": int(hits[2]),
    }
    return {
        "confusion": table.tolist(),
        "third": third,
        "top2": (place <= 2)[counts].mean(),
        "perplexity": math.exp(-logs[counts].mean()),
        "precision": precision[there].mean(),
        "recall": recall[there].mean(),
        "f1": f1[there].mean(),
        "mae": np.abs(y - wanted).mean(),
        "r2": 1 - ((wanted - y) ** 2).sum() / ((wanted - wanted.mean()) ** 2).sum(),
    }


def same(have: dict[str, Any], want: dict[str, Any]) -> None:
    """Counts are equal, the other numbers up to rounding."""
    for name, value in want.items():
        assert have[name] == (value if isinstance(value, list | dict) else pytest.approx(value, rel=2e-5)), name


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_they_are_numpys(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the first batch in training, and of all batches, the last of them smaller, in an evaluation."""
    (folder / "model.py").write_text(MODEL.replace("self.drop(op, op.Tanh(self.a(op, x)))", "op.Tanh(self.a(op, x))"))
    rng = np.random.default_rng(2)
    x, wanted = (rng.standard_normal((60, size)).astype(np.float32) for size in (12, CLASSES))
    label = rng.integers(0, CLASSES, 60)
    np.savez(folder / "data.npz", x=x, label=label, wanted=wanted)
    weights = {key: one.const_value.numpy() for key, one in load(folder / "model.py").model.graph.initializers.items()}
    a, b = (weights[f"{layer}.weight"].astype(np.float64) for layer in "ab")
    a, b = (
        one if one.shape[0] in (12, 16) and one.shape == shape else one.T
        for one, shape in ((a, (12, 16)), (b, (16, 6)))
    )
    y = np.tanh(x @ a + weights["a.bias"]) @ b + weights["b.bias"]
    build = str(built(folder, PLANS[name], name))
    plan = ["--plan", f"{name}.yaml", "--in-process", "--threads", "1"]
    assert invoke(["train", build, *plan, "--metrics", "m.jsonl", "--evaluate", "100"]) == 0
    (row,) = (
        one for line in (folder / "m.jsonl").read_text().splitlines() if (one := json.loads(line))["kind"] == "train"
    )
    same(row, by_numpy(y[:24], label[:24], wanted[:24]))
    third = by_numpy(y[:24], label[:24], wanted[:24])["third"]
    told = ", ".join(f"{key} {value}" for key, value in third.items())
    assert (
        f"third {1 - (third['false_positives'] + third['false_negatives']) / sum(third.values()):.4f} ({told})"
        in capsys.readouterr().out
    )
    assert invoke(["eval", build, *plan, "--json", "--metrics", "m.csv"]) == 0
    want = by_numpy(y, label, wanted)
    same(json.loads(capsys.readouterr().out)["metrics"], want)
    with open(folder / "m.csv", newline="") as file:
        (cells,) = csv.DictReader(file)
    assert json.loads(cells["confusion"]) == want["confusion"]
    assert json.loads(cells["third"]) == want["third"]
    assert invoke(["eval", build, *plan]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("confusion, by prediction")
    assert [[int(cell) for cell in line.split()] for line in lines[at + 2 : at + 2 + CLASSES]] == [
        [k, *row] for k, row in enumerate(want["confusion"])
    ]
