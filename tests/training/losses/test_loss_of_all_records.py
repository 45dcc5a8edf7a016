"""The loss and the metrics of an evaluation are those of one batch of all its records, and so is the log's mean over steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from partc.runtime.artifact.training.metric_formula import MetricSums, Undefined
from partc.runtime.artifact.training.training_record import MetricsRecord
from partc.runtime.checker.check import check_artifact
from partc.runtime.execution.inputs import shard
from rows import of_today
from trainer_case import on_all
from training_equivalence import from_text, same_training

TEXT = """<ir_version: 10, opset_import: ["": 21]> m (float[batch, seq, 6] x) => (float[batch, seq, 5] y) <float[6, 8] w, float[8, 5] v> {
    [up] a = MatMul (x, w)  [act] b = Tanh (a)  [down] y = MatMul (b, v) }"""
OWN = """<ir_version: 10, opset_import: ["": 21]>
m (float[batch, seq, 6] x, float[batch, seq] counts) => (float loss) <float[6, 8] w, float[8, 1] v, int64[1] two = {2}, float one = {1.0}> {
    [up] a = MatMul (x, w)  [act] b = Tanh (a)  [down] c = MatMul (b, v)
    [endSqueeze] d = Squeeze (c, two)  [endMul] e = Mul (d, counts)
    [endSum] f = ReduceSum <keepdims = 0> (e)  [endCount] g = ReduceSum <keepdims = 0> (counts)
    [endMax] h = Max (g, one)  [endDiv] loss = Div (f, h) }"""
WEIGHTS = np.array([0.1, 3, 1, 0.5, 2])
WEIGHED = "weights: [0.1, 3, 1, 0.5, 2], "
CROSS = "type: softmax_cross_entropy, logits: y, labels: t, axis: 2"
LOSSES = {
    "plain": f"{{{CROSS}}}",
    "ignoring": f"{{{CROSS}, ignore_index: -1}}",
    "weighed": f"{{{CROSS}, {WEIGHED}ignore_index: -1}}",
    "sum": f"{{{CROSS}, {WEIGHED}ignore_index: -1, reduction: sum}}",
    "ranks": f"{{{CROSS}, {WEIGHED}ignore_index: -1, reduction: sum_over_ranks}}",
    "squares": "{type: mean_squared, prediction: y, target: z}",
    "own": "loss",
}
STAGES = "placement: {up: 0, down: 1}\n"
PLANS = {
    "one": (1, ""),
    "dp": (2, "dataset: data_parallel\n"),
    "tp": (2, "sharding: {up: {in: [[1, 1, 1], [1, 2]]}, down: {in: [[1, 1, 2], [2, 1]]}}\n"),
    "pipeline": (2, STAGES + "pipeline: {microbatches: 2}\n"),
    "stages": (3, "placement: {up: 0, down: 2}\n"),
    "parts": (1, "accumulate"),
}


def compiled(folder: Path, loss: str, plan: str) -> Source:
    """One of the models, trained by a loss in a plan's way at a rate of 0."""
    weights = {"w": (6, 8), "v": (8, 1)} if loss == "own" else {"w": (6, 8), "v": (8, 5)}
    source = from_text(OWN if loss == "own" else TEXT, weights)
    ranks, more = PLANS[plan]
    parts = "  accumulate: 2\n" if more == "accumulate" else ""
    metrics = "  metrics: [accuracy]\n" if "Entropy" in loss or "softmax" in LOSSES[loss] else ""
    text = f"ranks: {ranks}\n{more if not parts else ''}symbols: {{batch: {{divisor: 2}}}}\n"
    text += f"train:\n  loss: {LOSSES[loss]}\n  optimizer: {{type: sgd, lr: 0.0}}\n{parts}{metrics}  drop_last: false\n"
    compile_source(source, parse_plan(text, "plan.yaml"), folder, check=False)
    assert check_artifact(folder) == []
    return source


def batches(loss: str, *, empty: bool) -> list[dict[str, np.ndarray]]:
    """Batches of several sizes and lengths; `empty`: the second has no label that counts."""
    random, found = np.random.default_rng(3), []
    for k, (size, length) in enumerate(((4, 3), (2, 5), (6, 4), (2, 1))):
        t = np.where(random.random((size, length)) < 0.4, -1, random.integers(0, 5, (size, length)))
        t[0::2, 0] = 1  # each rank has a label
        if empty and k == 1:
            t[:] = -1
        if loss == "plain":
            t = np.abs(t)
        made = {
            "x": random.standard_normal((size, length, 6)),
            "t": t,
            "z": random.standard_normal((size, length, 5)),
            "counts": (t >= 0).astype(float),
        }
        found.append({name: one if name == "t" else one.astype(np.float32) for name, one in made.items()})
    return found


def whole(source: Source, loss: str, given: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """The loss and the accuracy of all records at once, in numpy."""
    w, v = (np.asarray(source.model.graph.initializers[name].const_value.numpy(), float) for name in ("w", "v"))
    y = np.concatenate([(np.tanh(one["x"] @ w) @ v).reshape(-1, v.shape[1]) for one in given])
    t, z, counts = (
        np.concatenate([one[name].reshape(-1, *one[name].shape[2:]) for one in given]) for name in ("t", "z", "counts")
    )
    if loss == "squares":
        return {"loss": float(np.square(y - z).mean())}
    if loss == "own":
        return {"loss": float((y[:, 0] * counts).sum() / counts.sum())}
    here = t >= 0
    logs = y - np.log(np.exp(y).sum(1, keepdims=True))
    weight = np.where(here, 1.0 if "weights" not in LOSSES[loss] else WEIGHTS[t], 0.0)
    total = -(logs[np.arange(len(t)), t] * weight).sum()
    hits = float((y.argmax(1) == t)[here].mean())
    return {"loss": float(total if loss == "sum" else total / weight.sum()), "accuracy": hits}


@pytest.mark.parametrize(
    ("loss", "plan"),
    of_today(
        [
            ("plain", "dp"),
            ("ignoring", "one"),
            ("ignoring", "stages"),
            ("weighed", "dp"),
            ("weighed", "tp"),
            ("weighed", "pipeline"),
            ("sum", "dp"),
            ("ranks", "dp"),
            ("squares", "parts"),
            ("own", "one"),
            ("own", "dp"),
        ],
        4,
    ),
)
def test_an_evaluation_is_of_all_its_records(loss: str, plan: str, tmp_path: Path) -> None:
    source, given = compiled(tmp_path / "build", loss, plan), batches(loss, empty=loss not in ("plain", "squares"))

    def act(trainer: Trainer) -> dict[str, float]:
        return trainer.evaluate((mine(trainer, one), len(one["x"])) for one in given)

    found = on_all(tmp_path / "build", PLANS[plan][0], act)[0]
    assert found == pytest.approx(whole(source, loss, given), rel=1e-6)


def mine(trainer: Trainer, batch: Mapping[str, np.ndarray]) -> dict[str, object]:
    """A rank's shards of a batch."""
    return {port.name: shard(port, trainer.rank, batch[port.name]) for port in trainer.inputs}


@pytest.mark.parametrize(
    ("loss", "plan"),
    of_today(
        [
            ("weighed", "dp"),
            ("weighed", "parts"),
            ("squares", "pipeline"),
            ("own", "stages"),
            ("plain", "dp"),
            ("ranks", "one"),
        ],
        2,
    ),
)
def test_steps_say_what_their_means_divide_by(loss: str, plan: str, tmp_path: Path) -> None:
    """What `advance` gives can be put together; a user of `train` sees nothing of it."""
    source, given = compiled(tmp_path / "build", loss, plan), batches(loss, empty=False)

    def act(trainer: Trainer) -> tuple[dict[str, float], set[str]]:
        record = trainer.record
        totals = MetricSums(record)
        for one in given:
            totals.add(trainer.advance(mine(trainer, one)), len(one["x"]))
        return totals.take(), {*trainer.train(mine(trainer, given[0]))}

    found, names = on_all(tmp_path / "build", PLANS[plan][0], act)[0]
    assert found == pytest.approx(whole(source, loss, given), rel=1e-6)
    assert names == found.keys()


@pytest.mark.parametrize("loss", ["weighed", "plain"])
def test_the_log_and_the_command_are_of_all_records(loss: str, tmp_path: Path) -> None:
    """A last, smaller batch counts by its labels; an evaluation without any is undefined."""
    source = compiled(tmp_path / "build", loss, "one")
    random = np.random.default_rng(5)
    t = random.integers(0, 5, (10, 3))
    if loss == "weighed":
        t = np.where(random.random((10, 3)) < 0.5, -1, t)
    t[:, 0] = 2
    data = {"x": random.standard_normal((10, 3, 6)).astype(np.float32), "t": t}
    np.savez(tmp_path / "d.npz", **data)
    want = whole(source, loss, [{**data, "z": data["x"], "counts": t}])
    asked = ["--in-process", "--data", str(tmp_path / "d.npz"), "--batch", "4"]
    told = tmp_path / "told.jsonl"
    assert invoke(["train", str(tmp_path / "build"), *asked, "--log", "epoch", "--metrics", str(told)]) == 0
    first = json.loads(told.read_text().splitlines()[0])
    assert {name: first[name] for name in want} == pytest.approx(want, rel=1e-5)
    assert invoke(["eval", str(tmp_path / "build"), *asked, "--json"]) == 0


def test_what_several_batches_are_together() -> None:
    """By denominators, by records, as sums; nothing where nothing counts."""
    totals = MetricSums(
        MetricsRecord(loss="loss", denominators={"loss": "loss.denominator"}, sums=["sum"]), adding=True
    )
    for loss, denominator, records in ((2.0, 3.0, 4), (math.nan, 0.0, 4), (5.0, 1.0, 2)):
        totals.add({"loss": loss, "loss.denominator": denominator, "accuracy": loss, "sum": 7.0}, records)
    found = totals.take()
    assert {**found, "accuracy": 0.0} == {"loss": 11 / 4, "accuracy": 0.0, "sum": 21.0}
    assert math.isnan(found["accuracy"])
    totals.add({"loss": math.nan, "loss.denominator": 0.0})
    undefined = totals.take()["loss"]
    assert isinstance(undefined, Undefined)
    assert undefined.reason == "none of the labels counts"
    steps = MetricSums(MetricsRecord(loss="loss", sums=["sum"]))
    for number in (2.0, 4.0):
        steps.add({"sum": number}, 8)
    assert steps.take() == {"sum": 3.0}


THROUGH_A_SEQUENCE = """<ir_version: 10, opset_import: ["": 21]>
m (float[batch, 3] x, float[batch, 5] z) => (float loss) <float[3, 6] w, int64 first = {0}> {
    [up] a = MatMul (x, w)  [square] b = Mul (a, a)  [mean] c = ReduceMean <keepdims = 0> (b)
    [pack] d = SequenceConstruct (z, z)  [unpack] e = SequenceAt (d, first)
    [there] f = Mul (e, e)  [mean_there] g = ReduceMean <keepdims = 0> (f)
    [both] h = Mul (z, z)  [mean_both] i = ReduceMean <keepdims = 0> (h)
    [total] loss = Sum (c, g, i) }"""


def test_a_number_of_the_whole_batch_is_made_of_an_input_that_another_rank_sends(tmp_path: Path) -> None:
    """What a rank is given and sends is at both ends the value that the receiver has of the whole batch."""
    plan = """ranks: 2
symbols: {batch: {divisor: 2}}
dataset: full_batch
placement: {there: [1]}
sharding: {total: replicate}
train: {loss: loss, optimizer: {type: sgd, lr: 0.5}, accumulate: 2}
"""
    chance = np.random.default_rng(3)
    steps = [
        {name: chance.normal(size=(4, n)).astype(np.float32) for name, n in [("x", 3), ("z", 5)]} for _ in range(2)
    ]
    model = partial(from_text, THROUGH_A_SEQUENCE, {"w": (3, 6)})
    same_training(model, plan, tmp_path, steps, rtol=1e-5, atol=1e-5)
