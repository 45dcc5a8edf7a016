"""Tables and the devices of a rank: what is pulled lies on the CPU, and rows are merged where they update."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Copy
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.checker.check import check_artifact
from rows import of_today
from training_equivalence import from_text, same_training

NET = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch, 2] ids) => (float[batch, 5] y) {
    [look_up] rows = Gather(table, ids)
    [sum] x = ReduceMean<keepdims = 0>(rows, axes)
    [up] h = MatMul(x, w)
    [act] a = Tanh(h)
    [head] y = MatMul(a, v)
}"""
SHAPES = {"table": (60, 4), "w": (4, 6), "v": (6, 5)}
TRAIN = """symbols: {batch: {divisor: 4, max: 8}}
dataset: data_parallel
target: cuda
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: labels}
  optimizer: {type: adagrad, lr: 0.1OF}
  clip: {norm: 0.5}
"""
PLANS = {
    "pulled": ("ranks: 2\nsharding: {look_up: pull}\n", ""),
    "pulled by stages": (
        "ranks: 4\nplacement: {'{look_up,sum,up}': [0, 1], '{act,head}': [2, 3]}\nsharding: {look_up: pull}\n"
        "pipeline: {microbatches: 2}\n",
        ", target: cuda",
    ),
    "served": ("ranks: 3\nroles: {ps: 2}\nplacement: {'{look_up,up}': {role: ps}}\n", ", target: cuda"),
    "updated on the CPU": ("ranks: 1\n", ", target: cpu"),
}


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_no_table_is_copied(name: str, tmp_path: Path) -> None:
    """With everything on a GPU; also where each row must stand once, as gradients are clipped by their norm."""
    text = NET.replace("{\n    [look", "\n  <int64[1] axes = {1}> {\n    [look")
    source = from_text(text, SHAPES)
    random = np.random.default_rng(4)
    steps = [{"ids": random.integers(0, 60, (8, 2)), "labels": random.integers(0, 5, 8)} for _ in range(2)]
    plan, of = PLANS[name]
    train = TRAIN.replace("OF", of)
    program = same_training(lambda: source, plan + train, tmp_path, steps, rtol=1e-5, atol=1e-5)
    assert not copied(program) & {"table", "w"} or name == "updated on the CPU", copied(program)
    assert {one.target for part in program.parts for one in part.state if one.tensor.startswith("table")} == {"cpu"}


def test_a_frozen_weight_beside_a_served_table_lies_where_it_is_read(tmp_path: Path) -> None:
    """And `check` follows it there, though a Pull on the same rank has outputs without names."""
    text = NET.replace("{\n    [look", "\n  <int64[1] axes = {1}> {\n    [look")
    plan = PLANS["served"][0].replace("up}", "sum}") + TRAIN.replace("OF", ", target: cpu").replace(
        "target: cuda", "target: {look_up: cuda}"
    )
    plan = plan.replace("'{look_up,sum}': {role: ps}", "look_up: {role: ps}")
    compile_source(
        from_text(text, SHAPES), parse_plan(f"{plan}  parameters: {{v: {{frozen: true}}}}\n", "p.yaml"), tmp_path / "b"
    )
    assert check_artifact(tmp_path / "b") == []


def copied(program: Complete) -> set[str]:
    """What is copied between targets, on any rank."""
    return {str(step.source) for part in program.parts for step in part.steps if isinstance(step, Copy)}
