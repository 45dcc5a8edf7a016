"""Where a model merges dims in front of the records these stand apart: microbatches learn what the whole batch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from rows import of_today
from training_equivalence import from_text, run_whole, same_training

HEAD = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, LENGTH, 6] x, int64[batch] labels) => (float[batch, 5] y)
<float[6, 6] w, float[6, 8] up, float[8] shift, float[8, 5] down, int64[1] seq = {1}, int64[2] tokens = {-1, 6}> {
"""
ATTENTION = (
    HEAD
    + """    [turn] t = Transpose <perm = [1, 0, 2]> (x)
    [flat] f = Reshape (t, tokens)
    [mix] p = MatMul (f, w)
    [shape] s = Shape (t)
    [length] l = Shape <start = 0, end = 1> (t)
    [rows] n = Shape <start = 1, end = 2> (t)
    [two] two = Constant <value = int64[1] {2}> ()
    [three] three = Constant <value = int64[1] {3}> ()
    [heads] nh = Mul (n, two)
    [by_heads] lh = Concat <axis = 0> (l, nh, three)
    [split] q = Reshape (p, lh)
    [heads_first] h = Transpose <perm = [1, 0, 2]> (q)
    [heads_last] k = Transpose <perm = [0, 2, 1]> (h)
    [scores] a = MatMul (h, k)
    [soft] b = Softmax <axis = 2> (a)
    [weigh] c = MatMul (b, h)
    [back] d = Transpose <perm = [1, 0, 2]> (c)
    [joined] e = Reshape (d, tokens)
    [grow] g = Gemm (e, up, shift)
    [bend] act = Tanh (g)
    [eight] eight = Constant <value = int64[1] {8}> ()
    [wide] lw = Concat <axis = 0> (l, n, eight)
    [apart] r = Reshape (act, lw)
    [zero] zero = Constant <value = int64[1] {0}> ()
    [pool] v = ReduceMean <keepdims = 0> (r, zero)
    [last] y = MatMul (v, down)
}"""
)
"""As torch's MultiheadAttention: [length, batch, width] as [length * batch, width], and [length, batch * heads, width / heads]."""
MERGED = (
    HEAD
    + """    [rows_first] f = Reshape (x, tokens)
    [turn] t = Transpose <perm = [1, 0, 2]> (x)
    [tokens_first] g = Reshape (t, tokens)
    [both] p = Add (f, g)
    [shape] s = Shape (x)
    [apart] r = Reshape (p, s)
    [pool] v = ReduceMean <keepdims = 0> (r, seq)
    [grow] u = MatMul (v, up)
    [last] y = MatMul (u, down)
}"""
)
"""Adds the tokens of different records: two ways to merge dims of the same sizes."""
STRADDLING = (
    HEAD
    + """    [thirds] thirds = Constant <value = int64[2] {-1, 9}> ()
    [turn] t = Transpose <perm = [1, 0, 2]> (x)
    [shape] s = Shape (t)
    [some] f = Reshape (t, thirds)
    [soft] g = Softmax <axis = 1> (f)
    [back] r = Reshape (g, s)
    [zero] zero = Constant <value = int64[1] {0}> ()
    [pool] v = ReduceMean <keepdims = 0> (r, zero)
    [grow] u = MatMul (v, up)
    [last] y = MatMul (u, down)
}"""
)
"""Takes elements of two records as one group."""
NUMBERED = (
    HEAD
    + """    [sizes] s = Shape <start = 0, end = 1> (x)
    [many] n = Squeeze (s)
    [from] zero = Constant <value = int64 {0}> ()
    [by] one = Constant <value = int64 {1}> ()
    [count] i = Range (zero, n, one)
    [own] own = Gather (x, i)
    [real] f = Cast <to = 1> (i)
    [aligned] c = Unsqueeze (f, seq)
    [pool] v = ReduceMean <keepdims = 0> (own, seq)
    [times] t = Mul (v, c)
    [grow] u = MatMul (t, up)
    [last] y = MatMul (u, down)
}"""
)
"""Weighs a record by its number, which a microbatch does not know."""
WEIGHTS = {"w": (6, 6), "up": (6, 8), "shift": (8,), "down": (8, 5)}
TRAIN = "train:\n  loss: {type: softmax_cross_entropy, logits: y, labels: labels}\n  optimizer: {type: sgd, lr: 0.5}\n"
STAGED = (
    "ranks: 2\nplacement: {'**': 0, '{pool,last,AT}': 1}\npipeline: {microbatches: 4}\nsymbols: {batch: {divisor: 4}}\n"
)
PARTS = "ranks: 1\nsymbols: {batch: {divisor: 4}}\n"
ACCUMULATED = "  accumulate: 4\n"
DEALT = "ranks: 2\nsymbols: {batch: {divisor: 8}}\ndataset: data_parallel\n"


def steps(length: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [
        {"x": rng.standard_normal((n, length, 6)).astype(np.float32), "labels": rng.integers(0, 5, n)} for n in (8, 16)
    ]


def source(text: str, length: str) -> Source:
    return from_text(text.replace("LENGTH", length), WEIGHTS)


CASES = {
    "stages": (STAGED.replace("AT", "grow,bend") + TRAIN, "4"),
    "merged dims of one size": (STAGED.replace("AT", "joined,grow,bend,apart") + TRAIN, "4"),
    "merged dims": (STAGED.replace("AT", "joined,grow,bend,apart") + TRAIN, "length"),
    "accumulated": (PARTS + TRAIN + ACCUMULATED, "length"),
    "data parallel": (DEALT + TRAIN + ACCUMULATED, "4"),
}


@pytest.mark.parametrize("case", of_today([*CASES], 2))
def test_records_that_stand_apart_are_those_of_the_microbatch(case: str, tmp_path: Path) -> None:
    plan, length = CASES[case]
    given = steps(4 if length == "4" else 7)
    whole = run_whole(source(ATTENTION, length), PARTS + TRAIN, given)
    program = same_training(lambda: source(ATTENTION, length), plan, tmp_path, given, rtol=1e-5, atol=1e-4, whole=whole)
    assert program.warnings == ()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (MERGED, "both (Add) may bring records"),
        (STRADDLING, "some (Reshape) may bring records"),
        (NUMBERED, "count (Range) numbers the records of the batch"),
    ],
    ids=["two ways to merge", "straddling", "numbered"],
)
def test_records_that_cannot_be_told_apart_are_refused(text: str, word: str, tmp_path: Path) -> None:
    plan = STAGED.replace(",AT", "") + TRAIN
    with pytest.raises(CompileError) as error:
        compile_source(source(text, "length"), parse_plan(plan, "plan.yaml"), tmp_path / "build")
    assert word in str(error.value)
