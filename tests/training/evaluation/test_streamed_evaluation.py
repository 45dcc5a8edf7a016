"""Evaluations of a pipeline run in microbatches, whose numbers are those of the whole batch; a batch that they do not divide runs whole."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from partc.cli.main import invoke
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.pipeline import PipelineRules
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from partc.runtime.artifact.format import EVALUATE_STREAMED
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.training.trainer import Evaluation
from rows import of_today
from trainer_case import on_all
from training_command_case import built, folder
from training_equivalence import from_text

__all__ = ["folder"]

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x) => (float[B, 5] y, float largest) <float[6, 8] u, float[8, 8] v, float[8, 5] w> {
    a = MatMul (x, u)
    b = Tanh (a)
    c = MatMul (b, v)
    rate = Constant <value = float {0.5}> ()
    on = Constant <value = bool {1}> ()
    d = Dropout (c, rate, on)
    e = Tanh (d)
    y = MatMul (e, w)
    largest = ReduceMax <keepdims = 0> (y)
}
"""
WEIGHTS = {"u": (6, 8), "v": (8, 8), "w": (8, 5)}
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: kind, ignore_index: 4, weights: [1, 2, 0.5, 1, 3]}
  optimizer: {type: sgd, lr: 0.1}
  metrics: {accuracy: , ppl: {type: perplexity}, confusion: , off: {type: mse, prediction: y, target: t}}
"""
TWO = "ranks: 2\nplacement: {MatMul_0: 0, MatMul_1: 1}\n"
PLANS = {
    "1f1b": TWO + "pipeline: {microbatches: 4, schedule: 1f1b}\n",
    "zb_h1": TWO + "pipeline: {microbatches: 8, schedule: zb_h1, memory: 6 microbatches}\n",
    "rows": TWO + "pipeline: {microbatches: 2, schedule: ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']}\n",
    "v": "ranks: 2\nplacement: {MatMul_0: 0, MatMul_1: 1, MatMul_2: 0}\npipeline: {microbatches: 4, schedule: auto}\n",
    "sums": TWO + "pipeline: {microbatches: 4}\n",
    "recomputed": TWO + "pipeline: {microbatches: 4, schedule: gpipe, recompute: [MatMul_0]}\n",
    "with shards": "ranks: 4\nmesh: {pp: 2, dp: 2}\ndataset: {x: [dp, null], kind: [dp], t: [dp, null]}\n"
    + "symbols: {B: {divisor: 4}}\n"
    + "placement: {MatMul_0: {pp: 0}, MatMul_1: {pp: 1}}\npipeline: {microbatches: 2, schedule: 1f1b}\n",
    "ranks alike": "ranks: 4\nmesh: {pp: 2, tp: 2}\nprecision: {compute: bfloat16, loss_scale: none}\n"
    + "placement: {MatMul_0: {pp: 0}, MatMul_1: {pp: 1}}\npipeline: {microbatches: 2, schedule: 1f1b}\n",
}  # fmt: skip
SIZES = (16, 16, 7)


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_numbers_are_those_of_whole_batches(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first batch without a label that counts, a last one of an odd size."""
    train = TRAIN.replace("weights:", "reduction: sum, weights:") if name == "sums" else TRAIN
    ranks = 4 if "ranks: 4" in PLANS[name] else 2
    compile_source(from_text(MODEL, WEIGHTS), parse_plan(PLANS[name] + train, "plan.yaml"), tmp_path, check=False)
    assert check_artifact(tmp_path) == []
    assert EVALUATE_STREAMED in open_artifact(tmp_path).programs
    rng = np.random.default_rng(5)
    sizes = SIZES if ranks == 2 else (16, 16, 8)  # a plan that shards the batch must promise that it divides
    total = sum(sizes)
    given = {
        "x": rng.standard_normal((total, 6)).astype(np.float32),
        "t": rng.standard_normal((total, 5)).astype(np.float32),
        "kind": rng.integers(0, 5, total),
    }
    given["kind"][:16] = 4
    taken: dict[int, set[str]] = {}
    of = Evaluation.of

    def watched(self: Evaluation, records: int) -> object:
        found = of(self, records)
        taken.setdefault(records, set()).add(found.manifest.name)
        return found

    monkeypatch.setattr(Evaluation, "of", watched)

    def act(trainer: Trainer) -> tuple[dict[str, float], dict[str, float]]:
        dealt = {port.name for port in trainer.ports if port.boxes is not None}

        def batches() -> list[tuple[dict[str, np.ndarray], int]]:
            found, begin = [], 0
            for size in sizes:
                half, at = size // 2, begin + trainer.rank % 2 * (size // 2)
                rows = {key: slice(at, at + half) if key in dealt else slice(begin, begin + size) for key in given}
                found.append(({key: array[rows[key]].copy() for key, array in given.items()}, size))
                begin += size
            return found

        streamed = trainer.evaluate(batches())
        assert trainer._evaluation is not None
        trainer._evaluation._streamed = None
        return streamed, trainer.evaluate(batches())

    streamed, whole = on_all(tmp_path, ranks, act)[0]
    assert taken[16] == {EVALUATE_STREAMED, "evaluate"}
    assert taken[sizes[-1]] == {"evaluate"} | ({EVALUATE_STREAMED} if ranks == 4 else set())
    assert streamed.keys() == whole.keys() == {"loss", "accuracy", "ppl", "confusion", "off"}
    assert streamed == pytest.approx(whole, rel=2e-6)
    assert streamed["confusion"].counts == whole["confusion"].counts  # type: ignore[attr-defined]


def test_stages_run_at_the_same_time(tmp_path: Path) -> None:
    """The last microbatch ends after as many tasks as there are microbatches, and one more stage."""
    compile_source(from_text(MODEL, WEIGHTS), parse_plan(PLANS["1f1b"] + TRAIN, "plan.yaml"), tmp_path)
    schedule = (tmp_path / "ir/evaluate_streamed/schedule.txt").read_text()
    assert "rank 0: 0F0 0F1 0F2 0F3\nrank 1: 1F0 1F1 1F2 1F3\n" in schedule
    (total,) = re.findall(r"^# Total: ([\d.]+)", schedule, re.MULTILINE)
    works = [float(one) for one in re.findall(r"^# Stage \d: rank \d +F ([\d.]+)", schedule, re.MULTILINE)]
    assert float(total) == pytest.approx(min(works) + 4 * max(works), rel=0.05)


def test_what_microbatches_cannot_evaluate_is_whole(tmp_path: Path) -> None:
    """Accumulation on one group of ranks has nothing that could run at the same time; a sum over ranks of means is of one
    batch; a largest number of a microbatch is not that of the batch."""
    per_rank = (TWO + "pipeline: {microbatches: 4}\n" + TRAIN).replace(
        "ignore_index: 4, weights: [1, 2, 0.5, 1, 3]", "reduction: sum_over_ranks"
    )
    mixing = TWO + "pipeline: {microbatches: 4, statistics: microbatch}\n" + TRAIN.replace("t}}", "t}, largest: }")
    for k, (plan, why) in enumerate(
        (
            (mixing, "'largest' of a batch does not follow from those of its parts"),
            (per_rank, "the loss is a sum over ranks of means, which an evaluation has not"),
            ("ranks: 1\n" + TRAIN + "  accumulate: 4\n", ""),
            (TWO + TRAIN, ""),
        )
    ):
        compile_source(from_text(MODEL, WEIGHTS), parse_plan(plan, "plan.yaml"), tmp_path / str(k))
        artifact = open_artifact(tmp_path / str(k))
        assert artifact.programs == ["train", "evaluate"]
        assert artifact.manifest.training is not None
        assert artifact.manifest.training.not_streamed == why


def test_why_an_evaluation_is_whole_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the compile and by `partc inspect`, once each; of an evaluation in microbatches neither says anything."""
    model = from_text(MODEL, WEIGHTS).model
    ir.save(model, tmp_path / "m.onnx")
    mixing = PLANS["sums"].replace("4}", "4, statistics: microbatch}") + TRAIN.replace("t}}", "t}, largest: }")
    line = "evaluations run each batch whole, one stage after the other: 'largest' of a batch does not follow from those of its parts\n"
    for text, times in ((mixing, 1), (PLANS["sums"] + TRAIN, 0)):
        (tmp_path / "plan.yaml").write_text(text)
        for words in (
            ["compile", str(tmp_path / "m.onnx"), "--plan", str(tmp_path / "plan.yaml"), "-o", str(tmp_path / "build")],
            ["inspect", str(tmp_path / "build")],
        ):
            assert invoke(words) == 0
            assert capsys.readouterr().out.count(line) == times


def test_microbatches_of_an_evaluation_are_large(tmp_path: Path) -> None:
    """Twice as many as groups of ranks that work are enough: several of the step's are one, where they divide so."""
    rules = PipelineRules("plan.yaml:3", 24)
    assert [rules.of_forward_passes(groups).microbatches for groups in (2, 3, 4, 5, 12, 24)] == [4, 6, 8, 12, 24, 24]
    assert replace(rules, microbatches=3).of_forward_passes(2).microbatches == 3
    compile_source(from_text(MODEL, WEIGHTS), parse_plan(PLANS["zb_h1"] + TRAIN, "plan.yaml"), tmp_path)
    schedule = (tmp_path / "ir/evaluate_streamed/schedule.txt").read_text()
    assert "rank 0: 0F0 0F1 0F2 0F3\nrank 1: 1F0 1F1 1F2 1F3\n" in schedule
    fixed = MODEL.replace("B, 6", "2, 6").replace("B, 5", "2, 5")
    compile_source(from_text(fixed, WEIGHTS), parse_plan(PLANS["zb_h1"] + TRAIN, "plan.yaml"), tmp_path / "fixed")
    assert "0F7" in (tmp_path / "fixed/ir/evaluate_streamed/schedule.txt").read_text()


COMMAND = """
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label}
  optimizer: {type: adam, lr: 0.01}
  metrics: [accuracy, confusion]
  data: data.npz
  test: data.npz
  batch: 16
  steps: 6
  ema: {decay: 0.9, evaluate: true}
"""


def test_ranks_of_a_job_stream(folder: Path) -> None:
    """Over MPI, of 60 records in batches of 16, with moving averages: the numbers of one rank."""
    whole = built(folder, "ranks: 1\n" + COMMAND, "one")
    plan = "ranks: 2\nplacement: {a: 0, b: 1}\nsymbols: {batch: {divisor: 4}}\npipeline: {microbatches: 4, schedule: 1f1b}\n"
    two = built(folder, plan + COMMAND, "two")
    found = {}
    for build in (whole, two):
        words = ["train", str(build), "--plan", f"{build.name}.yaml", "--threads", "1"]
        words += ["--metrics", f"{build.name}.jsonl", "--evaluate", "3"]
        assert invoke([*words, *["--in-process"] * (build is whole)]) == 0
        rows = map(json.loads, (folder / f"{build.name}.jsonl").read_text().splitlines())
        found[build.name] = [row for row in rows if row["kind"] == "test"]
    assert [row["step"] for row in found["two"]] == [3, 6]
    for have, want in zip(found["two"], found["one"], strict=True):
        assert have["confusion"] == want["confusion"]
        assert have["loss"] == pytest.approx(want["loss"], rel=1e-5)
