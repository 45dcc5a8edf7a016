"""A small training for loops of one's own: its artifact, its batches, and an act of the trainers of all ranks, which are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
from compiled_once import compiled_once
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer, load_trainer
from partc.runtime.communication.in_process import LocalWorld
from training_equivalence import from_text

Result = TypeVar("Result")
TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
m (float[B, 6] x) => (float[B, 4] y) <float[6, 8] w, float[8, 4] v> {
    a = MatMul (x, w)
    b = Tanh (a)
    y = MatMul (b, v)
}
"""
TRAIN = """
train:
  loss: {type: mean_squared, prediction: y, target: t}
  optimizer: {type: momentum, lr: 0.1}
  metrics: {off: {type: mae}}
"""
PARALLEL = "ranks: 2\ndataset: data_parallel\nsymbols: {B: {divisor: 2}}\n" + TRAIN


def built(folder: Path, plan: str) -> Path:
    def compile_into(out: Path) -> None:
        compile_source(from_text(TEXT, {"w": (6, 8), "v": (8, 4)}), parse_plan(plan, "plan.yaml"), out)

    return compiled_once(folder, ("trainer", plan), compile_into)


def batch(step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    whole = {name: rng.standard_normal((8, size)).astype(np.float32) for name, size in (("x", 6), ("t", 4))}
    return {name: array[rows] for name, array in whole.items()}


def on_all(folder: Path, ranks: int, act: Callable[[Trainer], Result], ahead: Path | None = None) -> list[Result]:
    world = LocalWorld(ranks)

    def rank(number: int) -> Result:
        with load_trainer(folder, world.transport(number), threads=1, ahead=ahead) as trainer:
            return act(trainer)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(rank, range(ranks)))
