"""A small training whose batch may hold a number that is not finite, and the bits that a trainer keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from batch_in_parts import shard
from compiled_once import compiled_once
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from partc.runtime.checker.check import check
from training_equivalence import from_text

NORMALIZED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 4] y)
<float[6, 8] w, float[8, 4] v, float[8] weight, float[8] bias, float[8] running_mean, float[8] running_var> {
    [up] a = MatMul (x, w)
    [bn] b = BatchNormalization (a, weight, bias, running_mean, running_var)
    [down] y = MatMul (b, v)
}"""
WEIGHTS: dict[str, tuple[int, ...]] = {"w": (6, 8), "v": (8, 4), "weight": (8,), "bias": (8,), "running_mean": (8,)}
LOSS = "train:\n  loss: {type: mean_squared, prediction: y, target: t}\n"
PLANS = {
    "alone": (1, "ranks: 1\n", "optimizer: {type: adam, lr: 0.1}"),
    "shared": (
        2,
        "ranks: 2\nmesh: {dp: 2}\ndataset: data_parallel\nsymbols: {batch: {divisor: 8}}\n",
        "optimizer: {type: adam, lr: 0.1, shard: dp}\n  clip: {norm: 1}",
    ),
    "placed": (2, "ranks: 2\nplacement: {up: 0, bn: 0, down: 1}\n", "optimizer: {type: lamb, lr: 0.1}"),
    "cut": (
        2,
        "ranks: 2\nmesh: {tp: 2}\nsharding: {down: {parameters: {v: [tp, null]}}}\n",
        "optimizer: {type: lamb, lr: 0.1}\n  clip: {value: 0.5}",
    ),
    "in parts": (
        2,
        "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 8}}\n",
        "optimizer: {type: momentum, lr: 0.1, momentum: 0.9}\n  accumulate: 2",
    ),
}


def source() -> Source:
    return from_text(NORMALIZED, {**WEIGHTS, "running_var": (8,)}, seed=8)


def batch(step: int, bad: float | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    found = {name: rng.standard_normal((8, size)).astype(np.float32) for name, size in (("x", 6), ("t", 4))}
    if bad is not None:
        found["x"][5, 2] = bad
    return found


def fed(trainer: Trainer, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {port.name: shard(whole[port.name], port.box(trainer.rank)) for port in trainer.inputs}


def kept(trainer: Trainer) -> dict[str, bytes]:
    return {record.tensor: array.tobytes() for record, array in trainer.program.state.arrays()}


def built(folder: Path, name: str, policy: str) -> tuple[Path, int]:
    ranks, plan, more = PLANS[name]
    text = f"{plan}{LOSS}  {more}\n  on_nonfinite: {policy}\n"

    def compile_into(out: Path) -> None:
        compile_source(source(), parse_plan(text, "plan.yaml"), out, check=False)
        assert check(out).violations == []

    return compiled_once(folder, ("nonfinite", text), compile_into), ranks
