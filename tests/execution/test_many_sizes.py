"""A program whose sizes change with every step, more sizes than are kept apart, gives the bits of one that is made for each size."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.execution import step_plans
from partc.runtime.execution.in_process import LocalProgram
from partc.runtime.execution.step_plan import StepPlan
from rows import of_today
from sharded_models import BLOCK_STYLES, block
from training_equivalence import tensors

TENSOR = f"ranks: 2\nsharding: {{{BLOCK_STYLES}}}\n"
SEQUENCE = """ranks: 2
symbols: {seq: {divisor: 2}}
dataset: {x: [1, 2, 1]}
sharding: {norm1: {in: [[1, 2, 1], null, null]}}
outputs: cut
"""
STAGES = "ranks: 2\nplacement: {up: [1], act: [1], down: [1], bias: [1], res2: [1]}\n"
PARTS = "ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 2}}\ndataset: {x: [dp, null, null]}\n"
BOTH = PARTS + f"sharding: {{{BLOCK_STYLES}}}\noutputs: [0]\n"
TRAINED = """train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: momentum, lr: 0.1, momentum: 0.9, shard: true}
"""
PLANS = {
    "one": ("ranks: 1\n", 1),
    "tensor": (TENSOR, 1),
    "sequence": (SEQUENCE, 2),
    "stages": (STAGES, 1),
    "both": (BOTH, 2),
    "trained": (BOTH + TRAINED, 2),
    "trained stages": (STAGES + TRAINED.replace(", shard: true", ""), 1),
}


def sizes(of: int) -> list[tuple[int, int]]:
    """Sizes of batch and sequence, multiples of a number: growing, then at random."""
    chance = random.Random(5)
    growing = [(2 * of, of * n) for n in range(1, 14)]
    return [*growing, *((of * chance.randint(1, 6), of * chance.randint(1, 12)) for _ in range(20))]


@pytest.fixture
def resized(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was said to each plan that was to take other sizes: whether it did."""
    found: list[bool] = []
    plain = step_plans.resize

    def noted(plan: StepPlan, *sizes: Any) -> bool:
        found.append(plain(plan, *sizes))
        return found[-1]

    monkeypatch.setattr(step_plans, "resize", noted)
    return found


def taken(ranks: LocalProgram, steps: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Copies of what each step gives, and of all tensors behind it."""
    names = {port.name for port in ranks.inputs}
    lr = {"lr": np.array(0.1, np.float32)}
    made = []
    for step in steps:
        given = {name: value for name, value in {**step, **lr}.items() if name in names}
        made.append({**{name: np.array(one) for name, one in ranks(given).items()}, **tensors(ranks)})
    return made


@pytest.mark.parametrize(
    ("plan", "filled"),
    [
        ("tensor", ""),
        ("trained", "1"),
        *of_today([*((plan, "1") for plan in PLANS if plan != "trained"), ("trained stages", "")], 1),
    ],
)
def test_sizes_that_go_on_changing(
    plan: str, filled: str, tmp_path: Path, resized: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTC_FILL_FREED", filled)
    text, of = PLANS[plan]
    compile_source(Source(from_proto(block(), Path("model.onnx"))), parse_plan(text, "plan.yaml"), tmp_path)
    chance = np.random.default_rng(2)
    steps = []
    for batch, seq in sizes(of):
        x, t = (chance.normal(size=(batch, seq, 24)).astype(np.float32) for _ in "xt")
        steps.append({"x": x, "t": t})
    with load_local(tmp_path) as ranks:
        have = taken(ranks, steps)
    assert resized.count(True) >= 8 * len(ranks.ranks)
    monkeypatch.setattr(step_plans, "MOST_PLANS", 1000)
    with load_local(tmp_path) as ranks:
        want = taken(ranks, steps)
    for one, other in zip(have, want, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert np.array_equal(one[name], value), name
