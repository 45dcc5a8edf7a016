"""A step, the evaluation, and the programs of parts of a batch: parameters lie alike in all of them, and inputs arrive alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training_equivalence import from_text, same_training

HEAD = '<ir_version: 10, opset_import: ["" : 21]> m (float[batch, 4] x) => (float y)'
BY_ITS_EXTREME = f"""{HEAD} {{
    [extreme] e = ReduceMax <keepdims = 0> (w)
    [first] h = MatMul (x, w)
    [scaled] k = Mul (h, e)
    [act] t = Tanh (k)
    [mean] y = ReduceMean <keepdims = 0> (t)
}}"""
BY_ITS_RECORDS = f"""{HEAD} {{
    [count] n = Shape <start = 0, end = 1> (x)
    [number] c = Cast <to = 1> (n)
    [again] m = Shape <start = 0, end = 1> (x)
    [other] d = Cast <to = 1> (m)
    [share] s = Div (x, c)
    [less] l = Div (x, d)
    [loop] u = Loop (two, "", s) <body: graph = turns (int64 i, bool go, float[batch, 4] state) => (bool going, float[batch, 4] after) {{
        going = Identity (go)
        after = Sub (state, l)
    }}>
    [first] h = MatMul (u, w)
    [act] t = Tanh (h)
    [mean] y = ReduceMean <keepdims = 0> (t)
}}""".replace("{\n    [count]", "<int64 two = {2}> {\n    [count]")
TRAIN = "train: {loss: y, optimizer: {type: momentum, lr: 0.5}}\n"


def same(text: str, plan: str, folder: Path) -> None:
    random = np.random.default_rng(3)
    steps = [{"x": random.standard_normal((12, 4), dtype=np.float32)} for _ in range(2)]
    same_training(lambda: from_text(text, {"w": (4, 6)}), plan, folder, steps, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        "sharding: {scaled: {in: [[1, 2], null]}}\n",
        "placement: {first: [1, 0]}\nsharding: {scaled: {in: [[1, 2], null]}}\n",
        "placement: {extreme: 1}\nsharding: {scaled: {in: [[1, 2], null]}}\n",
    ],
)
def test_an_evaluation_reads_parameters_as_they_lie_when_they_are_trained(more: str, tmp_path: Path) -> None:
    """An extreme has other nodes where it trains, and other cuts are derived from them: `w` is whole in the step."""
    same(BY_ITS_EXTREME, f"ranks: 2\nsymbols: {{batch: {{divisor: 6}}}}\n{more}{TRAIN}", tmp_path)


@pytest.mark.parametrize("order", ["[0, 1, 2]", "[2, 1, 0]"])
def test_the_whole_batch_is_counted_as_a_step_gets_it(order: str, tmp_path: Path) -> None:
    """What the numbers of the whole batch are made of arrives on the ranks in the step's order."""
    plan = f"ranks: 3\nsymbols: {{batch: {{divisor: 12}}}}\ndataset: data_parallel\nplacement: {{number: [2, 0], other: {order}}}\n"
    same(BY_ITS_RECORDS, plan + TRAIN.replace("}}", "}, accumulate: 2}"), tmp_path)


@pytest.mark.parametrize("more", ["", "sharding: {loop: replicate, first: colwise}\n"])
def test_a_body_may_have_the_names_of_its_gradient(more: str, tmp_path: Path) -> None:
    """The gradient of a Loop is a Loop whose own values are called `going`, `turn`, `at` and `grad0`, too."""
    body = """{
    [first] h = MatMul (x, w)
    [loop] u = Loop (two, "", h) <body: graph = g (int64 turn, bool go, float[batch, 6] output1) => (bool going, float[batch, 6] after) {
        going = Identity (go)
        grad0 = Tanh (output1)
        at = Mul (grad0, h)
        after = Sub (output1, at)
    }>
    [act] t = Tanh (u)
    [mean] y = ReduceMean <keepdims = 0> (t)
}"""
    plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\ndataset: data_parallel\n{more}{TRAIN}"
    same(f"{HEAD} <int64 two = {{2}}> {body}", plan, tmp_path)


def test_an_input_that_overlapping_groups_read_whole_arrives_so_in_the_parts_too(tmp_path: Path) -> None:
    """`x` is whole on [2, 0, 1] and on [0, 1, 2], which is one value on each rank, and cut for one of its readers."""
    text = f"""{HEAD} {{
        [doubled] two = Concat <axis = 1> (x, x)
        [squares] q = Mul (two, two)
        [mean0] m0 = ReduceMean <keepdims = 0> (q)
        [first] h = MatMul (x, w)
        [act] t = Tanh (h)
        [mean1] m1 = ReduceMean <keepdims = 0> (t)
        [sum] y = Add (m0, m1)
    }}"""
    plan = (
        "ranks: 3\nsymbols: {batch: {divisor: 6}}\nplacement: {doubled: [2, 0, 1]}\n"
        "sharding: {act: {out: [[3, 1]]}, doubled: {in: [[1, 1], [1, 1]]}}\n"
    )
    same(text, plan + TRAIN.replace("}}", "}, accumulate: 2}"), tmp_path)


def test_numbers_of_the_batch_have_weights_and_bodies_of_their_own(tmp_path: Path) -> None:
    """`s` is made of the records alone: `axes` is read by nothing else, and the Loop's body reads `c` from around it."""
    text = f"""{HEAD} <int64 two = {{2}}, int64[2] axes = {{0, 1}}> {{
        [squares] c = Mul (x, x)
        [begin] b = ReduceMean <keepdims = 0> (c, axes)
        [loop] s = Loop (two, "", b) <body: graph = turns (int64 i, bool go, float state) => (bool going, float after) {{
            going = Identity (go)
            m = ReduceMean <keepdims = 0> (c, axes)
            after = Add (state, m)
        }}>
        [first] h = MatMul (x, w)
        [act] t = Tanh (h)
        [mean] l = ReduceMean <keepdims = 0> (t)
        [share] y = Div (l, s)
    }}"""
    plan = "ranks: 2\nsymbols: {batch: {divisor: 4}}\ndataset: data_parallel\n"
    same(text, plan + TRAIN.replace("}}", "}, accumulate: 2}"), tmp_path)
