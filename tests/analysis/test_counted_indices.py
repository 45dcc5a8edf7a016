"""Look-ups by indices that count are views: nothing is sent for them, and records taken by their number stay on their ranks."""

from __future__ import annotations

import numpy as np
import pytest
from equivalence import model, same_as_whole

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
SHARDED = "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\noutputs: sharded\n"
STRIDED = (
    HEAD
    + """m (float[batch, 3, 4] x) => (float[OUT] y)
<int64[1] flat = {-1}, int64 zero = {0}, int64 one = {1}, int64 outer = {OUTER}, int64 begin = {BEGIN}> {
    [bend] h = Tanh (x)
    [flat] f = Reshape (h, flat)
    [sizes] s = Shape <start = 0, end = 1> (x)
    [number] n = Squeeze (s)
    [count] r = Range (zero, n, one)
    [rows] p = Mul (r, outer)
    [axes] axes = Constant <value = int64[2] {1, 2}> ()
    [column] c = Unsqueeze (p, axes)
    [inner] inner = Constant <value = int64[1, A, B] {INNER}> ()
    [places] i = Add (c, inner)
    [moved] j = Add (i, begin)
    [strided] g = Gather (f, j)
    [last] y = Neg (g)
}"""
)


def strided(shape: tuple[int, int], steps: tuple[int, int], outer: int = 12, begin: int = 0) -> str:
    """As `torch.as_strided` of (batch, 3, 4) is exported."""
    inner = np.add.outer(np.arange(shape[0]) * steps[0], np.arange(shape[1]) * steps[1])
    text = STRIDED.replace("OUT]", f"batch, {shape[0]}, {shape[1]}]").replace("OUTER", str(outer))
    text = text.replace("INNER", ", ".join(map(str, inner.ravel()))).replace("BEGIN", str(begin))
    return text.replace("[1, A, B]", f"[1, {shape[0]}, {shape[1]}]")


def numbers(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).standard_normal((batch, 3, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "steps", "op"),
    [
        ((3, 4), (4, 1), "Reshape"),
        ((12, 1), (1, 1), "Reshape"),
        ((2, 6), (6, 1), "Reshape"),
        ((4, 3), (3, 1), "Reshape"),
        ((4, 3), (1, 4), "Transpose"),
        ((6, 2), (1, 6), "Transpose"),
    ],
)
def test_views_that_are_written_as_look_ups_cost_nothing(
    shape: tuple[int, int], steps: tuple[int, int], op: str
) -> None:
    program = same_as_whole(model(strided(shape, steps)), SHARDED, {"x": numbers(4)}, {"x": numbers(6)}, rtol=0, atol=0)
    kinds = [node.op_type for node in program.model.graph]
    assert program.events == ()
    assert "Gather" not in kinds
    assert "Range" not in kinds, "what only counted is gone"
    assert op in kinds[kinds.index("Reshape") + 1 :]


@pytest.mark.parametrize(
    ("shape", "steps", "outer", "begin"),
    [
        ((3, 2), (4, 2), 12, 0),  # every second column
        ((3, 2), (4, 1), 12, 1),  # from the second on
        ((2, 8), (4, 1), 12, 0),  # windows that overlap
        ((3, 4), (4, 0), 12, 0),  # one column four times
        ((3, 4), (0, 1), 12, 0),  # one row three times
    ],
)
def test_other_strides_stay_look_ups_and_right(
    shape: tuple[int, int], steps: tuple[int, int], outer: int, begin: int
) -> None:
    program = same_as_whole(model(strided(shape, steps, outer, begin)), SHARDED, {"x": numbers(4)}, rtol=0, atol=0)
    assert "Gather" in [node.op_type for node in program.model.graph]


MASKED = (
    HEAD
    + """m (float[batch, seq, 6] x, int64[batch, seq] mask, int64[batch] at) => (float[batch, seq, 6] y, float[batch, 6] z)
<int64 zero = {0}, int64 one = {1}, int64[3] tail = {1, 2, 3}, int64[3] lead = {0, 1, 2}, int64[1] end = {-1}, int64[1] first = {1}> {
    [bend] h = Tanh (x)
    [sizes] s = Shape <start = 0, end = 1> (x)
    [records] n = Squeeze (s)
    [count] r = Range (zero, n, one)
    [lengths] q = Shape <start = 1, end = 2> (x)
    [tokens] l = Squeeze (q)
    [places] t = Range (zero, l, one)
    [by_record] a = Unsqueeze (r, tail)
    [by_token] b = Unsqueeze (t, lead)
    [shape] both = Max (a, b)
    [wide] w = Shape (both)
    [records_wide] c = Expand (a, w)
    [tokens_wide] d = Expand (b, w)
    [records_in] e = Unsqueeze (c, end)
    [tokens_in] f = Unsqueeze (d, end)
    [pairs] i = Concat <axis = -1> (e, f)
    [seen] seen = Cast <to = 9> (mask)
    [taken] g = GatherND (seen, i)
    [dims] ones = Constant <value = int64[2] {2, 3}> ()
    [flat] k = Squeeze (g, first)
    [float] v = Cast <to = 1> (k)
    [turn] u = Transpose <perm = [0, 2, 1]> (v)
    [masked] y = Mul (h, u)
    [record] r1 = Unsqueeze (r, end)
    [token] a1 = Unsqueeze (at, end)
    [which] i1 = Concat <axis = -1> (r1, a1)
    [pooled] z = GatherND (y, i1)
}"""
)
"""A mask as Hugging Face's models export it, and the last token of each record as their classifiers take it."""


def masked(batch: int, seq: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch)
    x = rng.standard_normal((batch, seq, 6)).astype(np.float32)
    return {"x": x, "mask": rng.integers(0, 2, (batch, seq)), "at": rng.integers(0, seq, batch)}


@pytest.mark.parametrize("more", ["", "pipeline: {microbatches: 2}\n"])
def test_records_by_their_number_stay_on_their_ranks(more: str) -> None:
    plan = SHARDED.replace("divisor: 2", "divisor: 4") + more
    program = same_as_whole(model(MASKED), plan, masked(4, 5), masked(8, 3), rtol=0, atol=0)
    assert program.events == ()
    ops = {program.paths[node]: node for node in program.model.graph}
    assert "taken" not in ops
    assert ops["pooled"].attributes.get_int("batch_dims", 0) == 1
