"""A dynamic loss scale over microbatches: a step with a gradient that is not finite in any of them is skipped, and the scale halves once.

`torch.amp.GradScaler` over accumulated gradients is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dealt import dealt
from nonfinite_case import fed, kept
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from partc.runtime.checker.check import check_artifact
from trainer_case import on_all
from training_equivalence import from_text

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 4] y) <float[6, 8] w, float[8, 4] v> {
    [one] a = MatMul (x, w) [turn] b = Relu (a) [two] y = MatMul (b, v) }"""
TRAIN = """symbols: {batch: {divisor: 4}}
precision: {compute: float16, loss_scale: {first: 64, interval: 2}}
train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: sgd, lr: 0.05}
"""
PLANS = {
    "parts": (1, "ranks: 1\n" + TRAIN + "  accumulate: 2\n"),
    "parts of shards": (2, "ranks: 2\ndataset: data_parallel\n" + TRAIN + "  accumulate: 2\n"),
    "stages": (2, "ranks: 2\nplacement: {one: 0, turn: 0, two: 1}\npipeline: {microbatches: 2}\n" + TRAIN),
}
BAD = ((), (0,), (1,), (6,), (), (), (2, 7), (), ())
"""By step the records that are not finite: of the first part, of the second, of both."""


def source() -> Source:
    return from_text(MODEL, {"w": (6, 8), "v": (8, 4)}, seed=3)


def steps(bad: float) -> list[dict[str, np.ndarray[Any, Any]]]:
    found = []
    for number, records in enumerate(BAD):
        rng = np.random.default_rng(number)
        one = {name: rng.standard_normal((8, size)).astype(np.float32) for name, size in (("x", 6), ("t", 4))}
        one["x"][list(records), 3] = bad
        found.append(one)
    return found


def by_torch(
    weights: Mapping[str, np.ndarray[Any, Any]], bad: float
) -> tuple[list[tuple[float, int]], dict[str, np.ndarray[Any, Any]]]:
    """After each step the scale and the finite steps in a row; the parameters at the end."""
    torch = pytest.importorskip("torch", reason="GradScaler is the reference")
    own = {name: torch.nn.Parameter(torch.tensor(one)) for name, one in weights.items()}
    optimizer = torch.optim.SGD(own.values(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    found = []
    for step in steps(bad):
        for part in range(2):
            x, t = (torch.tensor(step[name][4 * part : 4 * part + 4]) for name in ("x", "t"))
            loss = ((torch.relu(x @ own["w"]) @ own["v"] - t) ** 2).mean() / 2
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), int(scaler.state_dict()["_growth_tracker"])))
    return found, {name: one.detach().numpy() for name, one in own.items()}


@pytest.mark.parametrize(("name", "bad"), dealt(PLANS, [np.inf, np.nan, 60000.0]))
def test_a_part_that_overflows_skips_the_step_once(name: str, bad: float, tmp_path: Path) -> None:
    """60,000 is finite in 16 bits, and its products are not: partc's alone, so that torch is given infinity."""
    ranks, plan = PLANS[name]
    compile_source(source(), parse_plan(plan, "plan.yaml"), tmp_path / "build", check=False)
    assert check_artifact(tmp_path / "build") == []

    def act(trainer: Trainer) -> tuple[list[tuple[float, int]], list[bool], dict[str, Any], dict[str, Any]]:
        first = {record.tensor: array.copy() for record, array in trainer.program.state.arrays()}
        found, same = [], []
        for step, records in zip(steps(bad), BAD, strict=True):
            before, skipped = kept(trainer), trainer.skipped
            trainer.train(fed(trainer, step))
            now = {record.tensor: array.copy() for record, array in trainer.program.state.arrays()}
            after = kept(trainer)
            changed = {one for one in after if after[one] != before[one]} - {"loss_scale", "loss_scale.steps"}
            same.append(bool(changed) != bool(records) and trainer.skipped - skipped == bool(records))
            found.append((float(now["loss_scale"]), int(now["loss_scale.steps"])))
        return found, same, first, now

    told = on_all(tmp_path / "build", ranks, act)
    first = {name: array for _, _, held, _ in told for name, array in held.items() if name in ("w", "v")}
    wanted, parameters = by_torch(first, bad if not np.isfinite(bad) else np.inf)
    for found, same, _, now in told:
        assert found == wanted
        assert same == [True] * len(BAD)
        for tensor in parameters.keys() & now.keys():
            np.testing.assert_allclose(now[tensor], parameters[tensor], rtol=2e-2, atol=2e-3)
