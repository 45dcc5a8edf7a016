"""The best checkpoint stays, and a training ends that gets no better: of two runs, one interrupted, all ranks judge alike."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from partc.cli.main import invoke
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.training.train_settings import EarlyStop
from partc.runtime.checkpoint.index import read_index, steps
from partc.runtime.training.best import BestEvaluation
from training_command_case import PARALLEL, built, folder, tensors, train

__all__ = ["folder"]

JUDGED = (
    PARALLEL
    + """  test: test.npz
  evaluate: 5
  early_stop: {metric: accuracy, patience: 4}
  checkpoint: {folder: runs, every: 15, keep: {last: 1, best: {metric: loss}}}
"""
)


def test_the_best_stays_and_no_better_ends_it_also_after_a_resume(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((24, 12)).astype(np.float32)
    np.savez(folder / "test.npz", x=x, label=rng.integers(0, 6, 24))  # nothing to learn: it gets worse in time
    build = str(built(folder, JUDGED))
    words = ["--epochs", "40", "--metrics", "m.jsonl"]
    assert train(build, *words) == 0
    told = capsys.readouterr().out
    rows = [row for row in map(json.loads, (folder / "m.jsonl").read_text().splitlines()) if row["kind"] == "test"]
    losses, hits = ([(row[name], row["step"]) for row in rows] for name in ("loss", "accuracy"))
    stopped, best = rows[-1]["step"], min(losses)[1]
    assert f"stopped early after step {stopped}: accuracy was no better than its best in 4 evaluations" in told
    assert stopped == max(hits, key=lambda one: (one[0], -one[1]))[1] + 20 < 200
    assert best not in (stopped, stopped // 15 * 15)
    assert [step for step, _ in steps(folder / "runs")] == sorted({best, stopped})
    meta = read_index(folder / "runs" / f"step_{stopped:08}").meta
    assert meta["best"] == {"metric": "loss", "value": min(losses)[0], "step": best, "waited": (stopped - best) // 5}
    again = ["--checkpoint", "again", *words, "--resume", "auto"]
    assert train(build, *again, "--steps", str(best + 5)) == 0
    assert train(build, *again) == 0
    assert read_index(folder / "again" / f"step_{stopped:08}").meta == meta
    assert tensors(folder / "again") == tensors(folder / "runs")
    assert [step for step, _ in steps(folder / "again")] == sorted({best, stopped})
    assert train(build, *again) == 0, "what was over stays over"
    assert re.search(rf"resumes after step {stopped} .*\n.*\nstopped early", capsys.readouterr().out)
    assert invoke(["train", build, "--plan", "build.yaml", "--in-process", "--keep", "2", "--steps", "3"]) == 0


def test_a_best_value_is_finite_and_better_by_min_delta() -> None:
    judge = BestEvaluation(EarlyStop(metric="a", mode="max", patience=2, min_delta=0.5), "loss")
    values = [float("nan"), 1.0, 1.4, 1.5, float("inf")]
    assert [judge.judge(step, {"a": value}) for step, value in enumerate(values)] == [False, True, False, False, False]
    assert (judge.value, judge.step, judge.waited, judge.is_over) == (1.0, 1, 3, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("early_stop: {metric: acuracy}", "'acuracy' is not a metric of this training"),
        ("checkpoint: {keep: {best: {metric: own}}}", "'own' has no mode"),
        ("early_stop: {patience: 0}", "patience"),
    ],
)
def test_what_cannot_be_judged_is_refused(line: str, message: str) -> None:
    plan = PARALLEL.replace("[accuracy]", "{accuracy: , own: {type: output, output: total}}")
    with pytest.raises(Exception, match=message) as error:
        parse_plan(f"{plan}  {line}\n", "plan.yaml")
    assert "plan.yaml:" in str(error.value)


def test_judges_need_evaluations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = str(built(folder, JUDGED.replace("  test: test.npz\n", "")))
    assert train(build) == 2
    assert "early_stop judges evaluations, and there are none" in capsys.readouterr().err
