"""Trains the models of `training_models.py` under a plan against one rank, whose run is computed once."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import training_models as models
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from training_equivalence import same_training, source_of
from training_models import Model

CROSS_ENTROPY = "loss: {type: softmax_cross_entropy, logits: y, labels: labels}"
SGD = f"train:\n  {CROSS_ENTROPY}\n  optimizer: {{type: sgd, lr: 0.5}}\n"
BLOCKS = '"layers.*.*.project": colwise, "layers.*.*.out": rowwise'
Sizes = Mapping[str, int]


def batches(rows: int) -> str:
    """The symbol of a batch that `rows` ranks share, which arrives cut."""
    return f"symbols: {{batch: {{divisor: {rows}}}}}\ndataset: data_parallel\n"


@functools.cache
def small(name: str) -> tuple[Model, Source]:
    """A model with sizes that 2, 3 and 4 divide where it is cut."""
    made = {
        "mlp": lambda: models.mlp(width=12, inputs=7),
        "lenet": models.lenet,
        "gpt": lambda: models.gpt(width=24, layers=2, heads=12, vocabulary=36, context=8),
        "gpt of one block": lambda: models.gpt(width=24, layers=1, heads=12, vocabulary=36, context=8),
        "dlrm": lambda: models.dlrm(tables=3, rows=12, width=6, dense=5, inner=12),
    }[name]()
    return made, source_of(made)


def learns(
    name: str, plan: str, sizes: Sequence[Sizes], folder: Path, train: str = SGD, atol: float = 1e-4
) -> Complete:
    """Trains a small model whole and by the plan on batches of the sizes."""
    one, source = small(name)
    if name == "dlrm":
        train = train.replace(CROSS_ENTROPY, "loss: loss")
    random = np.random.default_rng(7)
    steps = [one.feeds(random, **each) for each in sizes]
    return same_training(lambda: source, plan + train, folder, steps, rtol=1e-5, atol=atol)


def sizes_of(name: str, *rows: int) -> list[dict[str, int]]:
    """Batches of these rows; the length of sequences changes from step to step."""
    return [{"batch": n, **({"seq": 3 + k} if name.startswith("gpt") else {})} for k, n in enumerate(rows)]
