"""Models of attention over tokens that a plan shards, their data, and the bytes that each way takes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import onnx_ir as ir
from partc.compiler import nn
from partc.compiler.dims.expression import facts_of
from partc.compiler.dims.facts import Facts
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Comm

HEADS, KEYS, DEPTH, LENGTH = 12, 2, 4, 24
WIDTH = HEADS * DEPTH
INT64 = ir.DataType.INT64


class Layer(nn.Module):
    """Grouped attention as exporters of `transformers` write it, with a causal mask; `padded`: and one of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KEYS * DEPTH), nn.Linear(WIDTH, KEYS * DEPTH)

    def forward(self, op, x, visible):
        def by_head(y, heads):
            return op.Transpose(op.Reshape(y, op.Constant(value_ints=[0, 0, heads, DEPTH])), perm=[0, 2, 1, 3])

        def repeated(y):
            wide = op.Expand(
                op.Unsqueeze(y, op.Constant(value_ints=[2])),
                op.Constant(value_ints=[1, 1, HEADS // KEYS, 1, 1]),
            )
            return op.Reshape(wide, op.Constant(value_ints=[0, HEADS, -1, DEPTH]))

        k, v = repeated(by_head(self.k(op, x), KEYS)), repeated(by_head(self.v(op, x), KEYS))
        scores = op.MatMul(op.Mul(by_head(self.q(op, x), HEADS), DEPTH**-0.5), op.Transpose(k, perm=[0, 1, 3, 2]))
        shares = op.Softmax(op.Where(visible, scores, -1e9), axis=-1)
        mixed = op.Transpose(op.MatMul(shares, v), perm=[0, 2, 1, 3])
        return op.Add(x, self.out(op, op.Reshape(mixed, op.Constant(value_ints=[0, 0, WIDTH]))))


class Windowed(nn.Module):
    """Attention of tokens that see the last five, or so many that none in a test is further away."""

    def __init__(self, window: float) -> None:
        super().__init__()
        self.q, self.window = nn.Linear(8, 8), window

    def forward(self, op, x):
        q = op.Unsqueeze(self.q(op, x), op.Constant(value_ints=[1]))
        places = op.Range(0, op.Squeeze(op.Shape(x, start=1, end=2)), 1)
        gap = op.Sub(op.Unsqueeze(places, op.Constant(value_ints=[1])), places)
        seen = op.And(op.GreaterOrEqual(gap, 0), op.Less(op.Cast(gap, to=ir.DataType.FLOAT), self.window))
        shares = op.Softmax(op.Where(seen, op.MatMul(q, op.Transpose(q, perm=[0, 1, 3, 2])), -1e9), axis=-1)
        return op.Squeeze(op.MatMul(shares, q), op.Constant(value_ints=[1]))


class Decoder(nn.Module):
    """A layer over tokens; `keep` is 0 at tokens that none sees, where it is not causal alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(1)])
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, op, ids, keep=None):
        places = op.Range(0, op.Squeeze(op.Shape(ids, start=1, end=2)), 1)
        visible = op.LessOrEqual(places, op.Unsqueeze(places, [1]))
        if keep is not None:
            visible = op.And(visible, op.Cast(op.Unsqueeze(keep, [1, 2]), to=ir.DataType.BOOL))
        x = self.tokens(op, ids)
        for layer in self.layers:
            x = layer(op, x, visible)
        return self.head(op, x)


def decoder(causal: bool = False) -> Source:
    nn.seed(3)
    names = ["ids"] if causal else ["ids", "keep"]
    inputs = [Spec(name, ("batch", "seq"), INT64) for name in names]
    return Source(trace(Decoder(), inputs, ["logits"], "decoder.py"))


TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}
  optimizer: {type: sgd, lr: 0.1}
"""


def feeds(causal: bool = False) -> list[dict[str, np.ndarray]]:
    chance = np.random.default_rng(0)
    keep = (np.arange(LENGTH) >= np.array([[0], [5]])).astype(np.int64)
    ids, labels = chance.integers(0, 16, (2, 2, LENGTH))
    return [{"ids": ids, "labels": labels} | ({} if causal else {"keep": keep})]


def units(way: str, ranks: int, causal: bool) -> Fraction:
    """What a rank receives of an attention forward and backward, in units of batch * tokens * depth * 4 bytes."""
    blocks = Fraction(2 * KEYS * (ranks - 1), ranks)
    if way == "gather":
        return 2 * blocks
    if way == "ring":
        return 3 * blocks + (0 if causal else Fraction(2 * KEYS, ranks))
    keys = KEYS if KEYS % ranks == 0 else ranks if ranks % KEYS == 0 else HEADS
    return 2 * Fraction((2 * HEADS + 2 * keys) * (ranks - 1), ranks**2)


def received(program: Complete) -> int:
    """The bytes that a rank receives of queries, keys, values and their gradients, the most of all ranks."""
    sizes = {"batch": Facts.constant(2), "seq": Facts.constant(LENGTH)}
    found = [
        sum(
            facts_of(step.bytes, sizes).value or 0
            for step in part.steps
            if isinstance(step, Comm) and step.makes and DEPTH in (step.makes[0].shape or ())[-2:]
        )
        for part in program.parts
    ]
    return max(found)
