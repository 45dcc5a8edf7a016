"""What runs wherever it is read keeps its cuts and its ranks; random models and plans give the same programs again."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from annotations_case import compiled, programs, written
from random_annotations import work
from sharded_models import with_weights

CONSTANTS = """<ir_version: 11, opset_import: ["" : 21]>
main (float[5, 4] x, float[5, 6] z) => (float[5, 6] y, float[4, 6] u) {
    [product] m = MatMul (a, b)
    [shift] s = Add (m, c)
    [up] y = MatMul (x, s)
    [relu] u = Relu (s)
}"""
OF_INPUTS = """<ir_version: 11, opset_import: ["" : 21]>
main (float[7, 12] x) => (float[6, 7] y, float[7, 12] z) {
    [up] h = MatMul (x, v)
    [down] d = MatMul (h, w)
    [shift] s = Add (d, c)
    [turn] y = Transpose (s)
    [other] z = Tanh (h)
}"""
SIZES = """<ir_version: 11, opset_import: ["" : 21]>
main (float[batch, 4] x) => (float[batch, 4] y, float[batch, 6] z) {
    [sizes] s = Shape (x)
    [wide] e = Expand (f, s)
    [first] y = Tanh (e)
    [second] t = Neg (e)
    [down] z = MatMul (t, g)
}"""
WEIGHTS = {"a": (4, 12), "b": (12, 6), "c": (6,), "v": (12, 12), "w": (12, 6), "f": (1, 4), "g": (4, 6)}
CASES = {
    "constants that are cut, on two groups": (
        CONSTANTS,
        "ranks: 2\nplacement: {relu: 1}\nsharding: {product: {in: [[1, 2], [2, 1]]}, shift: replicate, up: {in: [[1, 1], null]}}\n",
    ),
    "what is made of inputs, on some ranks": (
        OF_INPUTS,
        "ranks: 6\nmesh: {dp: 3, tp: 2}\nsharding: {other: {in: [[1, 2]]}}\noutputs: [2, 5, 4, 1, 3]\n",
    ),
    "sizes of an input that arrives in shards, read whole on two groups": (
        SIZES,
        "ranks: 4\nsymbols: {batch: {divisor: 4}}\ndataset: {x: [2, 1]}\n"
        "placement: {first: [0, 1, 2, 3], second: [3, 2, 1, 0], down: [3, 2, 1, 0]}\nsharding: {sizes: replicate}\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_runs_where_it_is_read_is_annotated(case: str) -> None:
    text, plan = CASES[case]
    names = re.findall(r"\w+", text)
    first = compiled(with_weights(text, {name: shape for name, shape in WEIGHTS.items() if name in names}), plan)
    proto = written(first)
    assert programs(compiled(proto, None)) == programs(first)
    assert any(len(placed.groups) > 1 and placed.follows for placed in first.placement.values())


def test_the_nodes_of_a_function_keep_their_paths() -> None:
    text = """<ir_version: 11, opset_import: ["" : 21, "own" : 1]>
    main (float[batch, 12] x) => (float[batch, 6] y) { [block] h = own.twice(x)  [up] y = MatMul(h, w) }
    <opset_import: ["" : 21], domain: "own"> twice (a) => (b) { [add] b = Add(a, a) }"""
    first = compiled(with_weights(text, {"w": (12, 6)}), "ranks: 2\nsharding: {up: colwise}\n")
    again = compiled(written(first), None)
    assert [*again.paths.values()] == [*first.paths.values()] == ["block.add", "up"]


def test_random_models_by_random_plans(tmp_path: Path) -> None:
    """`work` raises where programs differ, and returns the refusal of a plan."""
    refusals = []
    for case in range(8):
        (tmp_path / str(case)).mkdir()
        refusals.append(work(random.Random(case), tmp_path / str(case)))
    assert refusals.count("") >= 5, refusals
