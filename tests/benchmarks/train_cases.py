"""The models whose training is measured, compiled by a plan, with the weights and the records that all sides begin with.

    write(folder, CASES["gpt768"], data_parallel(2), 2)     build/, weights.npz of all parameters, feeds_0.npz and feeds_1.npz

Parameters have the names that torch's module has. A rank's feeds are its rows of one batch: `x`, `label`; of dlrm `x`, `ids`, `clicked`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from partc.compiler.pipeline import Report

sys.path.extend([str(path) for path in Path(__file__).parents[1].iterdir() if path.is_dir()])

from training_models import Model, dlrm, gpt, lenet, mlp, resnet

LR, MOMENTUM = 0.01, 0.9
CROSS_ENTROPY = "{type: softmax_cross_entropy, logits: y, labels: label}"


@dataclass(frozen=True)
class Case:
    """A model, the sizes of what one rank reads in a step, and the loss in a plan's words."""

    model: Callable[[], Model]
    sizes: dict[str, int]
    loss: str = CROSS_ENTROPY


CASES = {
    "mlp": Case(mlp, {"batch": 64}),
    "lenet": Case(lenet, {"batch": 64}),
    "gpt256": Case(lambda: gpt(256, 2, heads=4, vocabulary=1000), {"batch": 4, "seq": 64}),
    "gpt768": Case(lambda: gpt(768, 2, heads=12, vocabulary=1000), {"batch": 2, "seq": 128}),
    "resnet": Case(resnet, {"batch": 4}),
    "dlrm": Case(dlrm, {"batch": 128}, "loss"),
}


def data_parallel(ranks: int, bucket_mb: float = 10.0, loss: str = CROSS_ENTROPY) -> str:
    """A plan in which every rank has the whole network and its rows of each batch; of one rank, the plan of the whole."""
    cut = f"dataset: data_parallel\nsymbols: {{batch: {{divisor: {ranks}}}}}\n" if ranks > 1 else ""
    return f"ranks: {ranks}\n{cut}{train(loss)}  bucket_mb: {bucket_mb}\n"


def train(loss: str = CROSS_ENTROPY) -> str:
    """What all plans say of training."""
    return f"train:\n  loss: {loss}\n  optimizer: {{type: momentum, lr: {LR}, momentum: {MOMENTUM}}}\n"


def write(folder: Path, case: Case, plan: str, parts: int) -> Report:
    """Compiles into `folder/build` and writes the weights, and the feeds of each of so many parts of a batch."""
    from partc.compiler.pipeline import compile_source
    from partc.compiler.plan.read import parse_plan
    from training_equivalence import source_of

    one = case.model()
    source = source_of(one)
    if not (folder / "weights.npz").exists():
        stored = {name: value.const_value for name, value in source.model.graph.initializers.items()}
        learned = {name: value.numpy() for name, value in stored.items() if value is not None}
        np.savez(
            folder / "weights.npz", **{name: array for name, array in learned.items() if array.dtype == np.float32}
        )
        for part in range(parts):
            feeds = one.feeds(np.random.default_rng(part), **case.sizes)
            named = {"label" if name == "labels" else name: array for name, array in feeds.items()}
            np.savez(folder / f"feeds_{part}.npz", **named)
    return compile_source(source, parse_plan(plan, "plan.yaml"), folder / "build")


def feeds(folder: Path, part: int) -> dict[str, np.ndarray]:
    """What one part of a batch holds."""
    with np.load(folder / f"feeds_{part}.npz") as stored:
        return {name: stored[name] for name in stored.files}
