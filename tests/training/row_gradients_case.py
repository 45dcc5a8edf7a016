"""A model that looks rows of a table up twice, its plan and its batches."""

from __future__ import annotations

import numpy as np
from partc.compiler.frontend.source import Source
from training_equivalence import from_text

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
LOOKED_UP = """main (int64[batch, 3] ids, int64[batch] more) => (float[batch, 5] y) {
    [look] e = Gather(table, ids)
    [shape] shape = Constant <value_ints = [0, 12]> ()
    [flat] f = Reshape(e, shape)
    [again] g = Gather(table, more)
    [all] h = Concat <axis = 1> (f, g)
    [head] y = MatMul(h, weight)
}"""
WEIGHTS = {"table": (90, 4), "weight": (16, 5)}
SYMBOLS = "symbols: {batch: {divisor: 6, max: 6}}\n"
TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: OPTIMIZER}\n"


def looked_up() -> Source:
    return from_text(HEAD + LOOKED_UP, WEIGHTS)


def batches(count: int = 3, batch: int = 6) -> list[dict[str, np.ndarray]]:
    """Few distinct ids, so that they stand twice on a rank and on several; some count from the end."""
    rng = np.random.default_rng(3)
    return [
        {
            "ids": rng.integers(-5, 5, (batch, 3)),
            "more": rng.integers(-3, 8, batch),
            "t": rng.standard_normal((batch, 5)).astype(np.float32),
        }
        for _ in range(count)
    ]
