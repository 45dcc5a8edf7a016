"""Parameters that are updated late: exactly as by a queue of that length in one process, under every plan, and across a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler import nn
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from rows import of_today
from training_equivalence import put, run, same_training, tensors
from training_models import INT64

TRAIN = """
symbols: {batch: {divisor: 4, max: 16}}
train:
  loss: {type: mean_squared, prediction: y, target: wanted, reduction: sum}
  optimizer: {type: sgd, lr: 0.1}
  parameters: {table.weight: {staleness: 2}, scale: {staleness: 1}}
"""
PLANS = {
    "data parallel": "ranks: 2\ndataset: data_parallel",
    "pulled": "ranks: 2\ndataset: data_parallel\nsharding: {table: pull}",
    "served": "ranks: 3\nroles: {ps: 2}\nplacement: {'*': {role: ps}}\ndataset: data_parallel",
    "columns": "ranks: 2\nsharding: {table: {parameters: {weight: [1, 2]}}}",
}
ROWS = 10


class Lookup(nn.Module):
    """y = table[ids] * scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, init=nn.init.normal(0.5))
        self.scale = nn.Parameter([4], "float32", init=nn.init.ones())

    def forward(self, op, ids):  # type: ignore[no-untyped-def]
        return op.Mul(self.table(op, ids), self.scale)


def lookup() -> Source:
    return Source(trace(Lookup(), [Spec("ids", ("batch",), INT64)], ["y"], "lookup"))


def batches(count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(8)
    return [
        {"ids": random.integers(0, ROWS, 8), "wanted": random.standard_normal((8, 4)).astype(np.float32)}
        for _ in range(count)
    ]


def test_updates_are_those_of_a_queue(tmp_path: Path) -> None:
    steps = batches(6)
    found = run(lookup(), "ranks: 1" + TRAIN, tmp_path, steps)
    table, scale = found.before["table.weight"].astype(np.float64), found.before["scale"].astype(np.float64)
    late = {"table": [np.zeros_like(table)] * 2, "scale": [np.zeros_like(scale)]}
    for step in steps:
        rows = table[step["ids"]]
        dy = 2 * (rows * scale - step["wanted"])
        d_table = np.zeros_like(table)
        np.add.at(d_table, step["ids"], dy * scale)
        late["table"].append(d_table)
        late["scale"].append((dy * rows).sum(0))
        table = table - 0.1 * late["table"].pop(0)
        scale = scale - 0.1 * late["scale"].pop(0)
    np.testing.assert_allclose(found.after["table.weight"], table, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.after["scale"], scale, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.after["table.weight.pending.1"], late["table"][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_under_every_plan(tmp_path: Path, name: str) -> None:
    for train in (TRAIN, TRAIN.replace("sgd, lr: 0.1", "momentum, lr: 0.05, momentum: 0.9") + "  clip: {norm: 1.0}\n"):
        same_training(lookup, PLANS[name] + train, tmp_path / train[-4:-2], batches(4), rtol=1e-5, atol=1e-5)


def test_pending_gradients_are_state(tmp_path: Path) -> None:
    from partc.runtime import load_local

    steps = batches(5)
    want = run(lookup(), PLANS["pulled"] + TRAIN, tmp_path / "all", steps)
    for plan in ("pulled", "data parallel"):
        begun = run(lookup(), PLANS[plan] + TRAIN, tmp_path / plan, steps[:3])
        with load_local(tmp_path / "all") as ranks:
            put(ranks, begun.after)
            for step in steps[3:]:
                ranks({**step, "lr": np.array(0.1, np.float32)})
            found = tensors(ranks)
        bits = 0.0 if plan == "pulled" else 1e-6
        for name, value in want.after.items():
            np.testing.assert_allclose(found[name], value, rtol=10 * bits, atol=bits, err_msg=name)


@pytest.mark.parametrize(
    ("train", "fact"),
    [
        (TRAIN + "  on_nonfinite: skip\n", "a step whose gradients are not finite changes nothing"),
        (TRAIN.replace("staleness: 2", "staleness: -1"), "expected at least 0"),
    ],
)
def test_what_cannot_wait(tmp_path: Path, train: str, fact: str) -> None:
    with pytest.raises(CompileError, match=fact):
        compile_source(lookup(), parse_plan("ranks: 1" + train, "plan.yaml"), tmp_path / "build")
