"""Terms of a sum are passed on through what is linear, and reduced where it costs least: never more than where they are made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from check_places_case import without
from dealt import dealt
from equivalence import compiled, same_as_whole
from hypothesis import HealthCheck, given, settings
from linear_chains import STYLES, WIDTH, at_once, chains, costs, kinds, parallel_block, passes
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.runtime.checker.check import check_artifact
from sharded_models import BLOCK_STYLES, block, with_weights
from training_equivalence import same_training

TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: momentum, lr: 0.05, momentum: 0.9}}\n"
GRID = "ranks: 4\nmesh: {dp: 2, tp: 2}\nsymbols: {batch: {divisor: 2}}\n"


def normal(*shape: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def block_plan(ranks: int) -> str:
    return f"ranks: {ranks}\noutputs: cut\nsharding: {{{STYLES}}}\n"


@pytest.mark.parametrize(("ranks", "biases"), dealt([2, 3, 6], [True, False]))
def test_a_block_with_parallel_attention_and_mlp_is_one_all_reduce(ranks: int, biases: bool) -> None:
    steps = [{"x": normal(b, s, 24)} for b, s in ((3, 5), (1, 4))]
    proto, plan = parallel_block(biases), block_plan(ranks)
    program = same_as_whole(proto, plan, *steps, rtol=1e-5, atol=1e-5)
    assert kinds(program) == {"AllReduce": 1}
    with at_once():
        assert kinds(passes(proto, plan)) == {"AllReduce": 2}


def test_a_block_in_sequence_stays_as_it_is() -> None:
    plan = f"ranks: 2\noutputs: cut\nsharding: {{{BLOCK_STYLES}}}\n"
    program = passes(block(), plan)
    with at_once():
        before = passes(block(), plan)
    assert [(event.name, event.op_type) for event in program.events] == [("o", "AllReduce"), ("d", "AllReduce")]
    assert [event.name for event in before.events] == [event.name for event in program.events]


def test_training_reduces_a_parallel_block_once_in_each_pass(tmp_path: Path) -> None:
    plan = f"ranks: 2\nsharding: {{{STYLES}}}\n{TRAIN}"
    steps = [{"x": normal(2, 5, 24, seed=k), "t": normal(2, 5, 24, seed=9 + k)} for k in range(2)]

    def source() -> Source:
        return Source(from_proto(parallel_block(True), Path("model.onnx")))

    program = same_training(source, plan, tmp_path, steps, rtol=1e-5, atol=1e-4)
    assert kinds(program, backward=False) == {"AllReduce": 1}
    assert kinds(program, backward=True) == {"AllReduce": 1}


def test_training_on_a_grid_with_shared_updates_and_parts_of_a_batch(tmp_path: Path) -> None:
    train = TRAIN.replace("momentum: 0.9}", "momentum: 0.9, shard: true}, accumulate: 2, clip: {norm: 0.5}")
    plan = (
        f"{GRID.replace('divisor: 2', 'divisor: 4')}dataset: {{x: [dp, null, null]}}\nsharding: {{{STYLES}}}\n{train}"
    )
    steps = [{"x": normal(4, 3, 24, seed=k), "t": normal(4, 3, 24, seed=9 + k)} for k in range(2)]

    def source() -> Source:
        return Source(from_proto(parallel_block(), Path("model.onnx")))

    same_training(source, plan, tmp_path, steps, rtol=1e-5, atol=2e-4)


THROUGH = {
    "Neg": "p = Neg(a)",
    "Sub": "p = Sub(x, a)",
    "Mul by a constant": "p = Mul(a, three)",
    "Mul by what is whole": "p = Mul(x, a)",
    "Div": "p = Div(a, three)",
    "Cast to a wider type": "w = Cast <to = 11> (a)\n p1 = Neg(w)\n p = Cast <to = 1> (p1)",
    "Transpose": "t = Transpose <perm = [1, 0]> (a)\n p = Transpose <perm = [1, 0]> (t)",
    "Reshape": "t = Reshape(a, apart)\n p = Reshape(t, together)",
    "Unsqueeze": "t = Unsqueeze(a, one)\n p = Squeeze(t, one)",
    "Split and Concat": "f, s = Split <axis = 1, num_outputs = 2> (a)\n p = Concat <axis = 1> (s, f)",
    "Concat with what is whole": "c = Concat <axis = 1> (a, x)\n f, p = Split <axis = 1, num_outputs = 2> (c)",
    "Where": "p = Where(flags, a, x)",
    "Mean": "p = Mean(a, x, a)",
    "ReduceSum": "s = ReduceSum(a, one)\n p = Add(s, x)",
    "Gather": "g = Gather <axis = 1> (a, places)\n p = Sum(g, x)",
    "Dropout": "p = Dropout(a)",
    "MatMul by what is whole": "p = MatMul(a, square)",
    "a bias": "p = Add(a, bias)",
}
CHAIN = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 6] y) <float three = {{3}}, int64[3] apart = {{0, 2, 3}}, int64[2] together = {{0, 6}},
    int64[1] one = {{1}}, int64[6] places = {{3, 1, 0, 0, 2, 5}}, bool[6] flags = {{1, 0, 0, 1, 1, 0}}> {{
    [up] u = MatMul(x, w1)
    [bend] b = Tanh(u)
    [down] a = MatMul(b, w2)
    [other] m = MatMul(b, w3)
    {through}
    [join] j = Add(p, m)
    [end] y = Tanh(j)
}}"""
WEIGHTS = {"w1": (6, 12), "w2": (12, 6), "w3": (12, 6), "bias": (6,), "square": (6, 6)}
PRODUCTS = {name: WEIGHTS[name] for name in ("w1", "w2", "w3")}
ROWS = "sharding: {up: colwise, down: rowwise, other: rowwise}\n"


@pytest.mark.parametrize("through", THROUGH)
def test_sums_pass_through_what_is_linear(through: str) -> None:
    lines = THROUGH[through]
    weights = {name: shape for name, shape in WEIGHTS.items() if name in lines or name.startswith("w")}
    proto = with_weights(CHAIN.format(through=lines), weights)
    plan = f"ranks: 3\noutputs: cut\n{ROWS}"
    program = same_as_whole(proto, plan, {"x": normal(4, 6)}, {"x": normal(1, 6)}, rtol=1e-5, atol=1e-5)
    dearer = through == "Cast to a wider type"
    assert [event.name for event in program.events] == (["a", "m"] if dearer else ["j"])


STOPPED = {
    "bent": "p = Relu(a)",
    "both factors": "p = Mul(a, m)",
    "a divisor": "p = Div(x, a)",
    "greatest": "p = Max(a, x)",
    "a narrower type": "h = Cast <to = 10> (a)\n p = Cast <to = 1> (h)",
    "a body": """count = Size (x)
        none = Constant <value_int = 0> ()
        flag = Greater (count, none)
        p = If (flag) <then_branch = t () => (float[batch, 6] o) { o = Neg(a) },
                       else_branch = e () => (float[batch, 6] q) { q = Neg(a) }>""",
}


@pytest.mark.parametrize("through", STOPPED)
def test_sums_do_not_pass_through_what_is_not(through: str) -> None:
    proto = with_weights(CHAIN.format(through=STOPPED[through]), PRODUCTS)
    close = 1e-2 if "narrower" in through else 1e-5
    program = same_as_whole(proto, f"ranks: 2\noutputs: cut\n{ROWS}", {"x": normal(4, 6)}, rtol=close, atol=close)
    assert [event.name for event in program.events] == ["a", "m"]


def test_what_the_plan_wants_in_a_layout_is_reduced_there() -> None:
    proto = with_weights(CHAIN.format(through="[neg] p = Neg(a)"), PRODUCTS)
    for rules in (
        ROWS.replace("down: rowwise", "down: {in: [[1, 2], [2, 1]], out: [[1, 1]]}"),
        ROWS.replace("}", ", neg: {out: [[1, 1]]}}"),
    ):
        program = same_as_whole(proto, f"ranks: 2\noutputs: cut\n{rules}", {"x": normal(4, 6)}, rtol=1e-5, atol=1e-5)
        assert kinds(program) == {"AllReduce": 2}


def test_infinities_of_what_is_kept_stay_infinities() -> None:
    mask = np.zeros((4, 6), np.float32)
    mask[0, 1], mask[2, 3] = -np.inf, np.inf
    text = CHAIN.format(through="p = Add(a, mask)").replace(
        "float[batch, 6] x)", "float[batch, 6] x, float[batch, 6] mask)"
    )
    proto = with_weights(text, PRODUCTS)
    program = same_as_whole(
        proto, f"ranks: 2\noutputs: cut\n{ROWS}", {"x": normal(4, 6), "mask": mask}, rtol=1e-5, atol=1e-5
    )
    assert [event.name for event in program.events] == ["j"]


EXPERTS = """<ir_version: 10, opset_import: ["" : 21]>
main (float[tokens, 6] x, float[tokens, 2] share) => (float[tokens, 6] y)
    <int64[2] flat = {-1, 1}, int64[3] apart = {-1, 2, 6}, int64[1] one = {1}, int64[3] twice = {1, 2, 1}, int64[2] rows = {-1, 6}> {
    [apart] x3 = Unsqueeze(x, one)
    [twice] x2 = Tile(x3, twice)
    [rows] xs = Reshape(x2, rows)
    [up] u = MatMul(xs, w1)
    [bend] b = Tanh(u)
    [down] a = MatMul(b, w2)
    [flat] s = Reshape(share, flat)
    [weigh] m = Mul(a, s)
    [experts] e = Reshape(m, apart)
    [total] t = ReduceSum <keepdims = 0> (e, one)
    [end] y = Tanh(t)
}"""


def test_experts_are_summed_up_before_ranks_are() -> None:
    """Of two experts a token, half of the bytes."""
    proto = with_weights(EXPERTS, {"w1": (6, 12), "w2": (12, 6)})
    plan = "ranks: 2\noutputs: cut\nsharding: {up: colwise, down: rowwise}\n"
    program = same_as_whole(proto, plan, {"x": normal(5, 6), "share": normal(5, 2)}, rtol=1e-5, atol=1e-5)
    assert [(event.name, event.bytes) for event in program.events] == [("t", "24*tokens")]
    with at_once():
        assert [event.bytes for event in passes(proto, plan).events] == ["48*tokens"]


PICKED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[tokens, 6] x, int64[tokens] ids, float[tokens, 1] share) => (float[tokens, 6] y) <int64[1] last = {-1}> {
    [into] h = MatMul(x, w)
    [column] c = Unsqueeze(h, last)
    [pick_up] u = Gather(ups, ids)
    [up] m = MatMul(u, c)
    [bend] b = Tanh(m)
    [pick_down] d = Gather(downs, ids)
    [down] e = MatMul(d, b)
    [flat] s = Squeeze(e, last)
    [weigh] t1 = Mul(s, share)
    [end] y = Tanh(t1)
}"""
"""A token's own expert, as a model of Hugging Face's picks it."""
EXPERT_WEIGHTS = {"w": (6, 6), "ups": (4, 30, 6), "downs": (4, 6, 30)}
IN_ROWS = "ranks: 2\nsharding: {'pick_{up,down}': {in: [[2, 1, 1], [1]]}}\n"


def test_experts_of_several_ranks_are_not_brought_together_in_training(tmp_path: Path) -> None:
    """Of a token the activations travel, and the gradients of what an expert is multiplied with, not the experts: 288 bytes, not 1,440."""
    proto = with_weights(PICKED, EXPERT_WEIGHTS)

    def source() -> Source:
        return Source(from_proto(proto, Path("model.onnx")))

    steps = [
        {"x": normal(5, 6, seed=k), "ids": np.arange(5) % 4, "share": normal(5, 1), "t": normal(5, 6, seed=8)}
        for k in range(2)
    ]
    program = same_training(source, IN_ROWS + TRAIN, tmp_path, steps, rtol=1e-5, atol=1e-4)
    sent = {event.name: event.bytes for event in program.events if event.shape != ()}
    assert sent == {"m": "120*tokens", "e": "24*tokens", "b.grad": "120*tokens", "c.grad": "24*tokens"}
    with at_once():
        assert {event.name: event.bytes for event in passes(proto, IN_ROWS + TRAIN).events if event.shape != ()} == {
            "u": "720*tokens",
            "d": "720*tokens",
        }


def test_experts_that_ranks_share_by_rows_are_told_with_the_better_cut() -> None:
    proto = with_weights(PICKED, EXPERT_WEIGHTS)
    (warning,) = passes(proto, IN_ROWS).warnings
    assert warning.startswith("plan.yaml:2: the 4 matrices of 'ups' are shared by 2 ranks")
    assert "bytes 120*tokens of 'm' are added up" in warning
    assert "`'ups': colwise`" in warning
    better = IN_ROWS.replace("'pick_{up,down}': {in: [[2, 1, 1], [1]]}", "ups: colwise, downs: rowwise")
    steps = {"x": normal(5, 6), "ids": np.arange(5) % 4, "share": normal(5, 1)}
    program = same_as_whole(proto, better, steps, rtol=1e-5, atol=1e-5)
    assert program.warnings == ()
    assert [(event.name, event.bytes) for event in program.events] == [("e", "24*tokens")]


def test_a_product_passes_no_sum_where_its_other_factor_learns(tmp_path: Path) -> None:
    proto = with_weights(CHAIN.format(through="p = Mul(a, bias)"), {**PRODUCTS, "bias": (6,)})
    for frozen, forward in (("", ["a", "m"]), (", parameters: {bias: {frozen: true}}", ["j"])):
        plan = f"ranks: 2\n{ROWS}{TRAIN.strip()[:-1]}{frozen}}}\n"
        steps = [{"x": normal(4, 6), "t": normal(4, 6, seed=8)}] * 2
        program = same_training(
            lambda: Source(from_proto(proto, Path("model.onnx"))),
            plan,
            tmp_path / (frozen and "frozen"),
            steps,
            rtol=1e-5,
            atol=1e-4,
        )
        names = [event.name for event in program.events if ".grad" not in event.name and event.shape != ()]
        assert names == forward


def test_dropout_of_terms_has_one_mask_on_all_ranks(tmp_path: Path) -> None:
    text = CHAIN.format(through="p = Dropout(a, ratio, yes)").replace(
        "float three", "bool yes = {1}, float ratio = {0.4}, float three"
    )
    proto = with_weights(text, PRODUCTS)
    steps = [{"x": normal(6, 6, seed=k), "t": normal(6, 6, seed=8)} for k in range(2)]
    program = same_training(
        lambda: Source(from_proto(proto, Path("model.onnx"))),
        f"ranks: 3\n{ROWS}{TRAIN}",
        tmp_path,
        steps,
        rtol=1e-5,
        atol=1e-4,
    )
    assert [event.name for event in program.events if ".grad" not in event.name and event.shape != ()] == ["j"]


@pytest.mark.parametrize("tag", [0, 1])
def test_the_checker_finds_a_reduction_that_is_left_out(tmp_path: Path, tag: int) -> None:
    """Of two chains one behind the other: terms that no collective reduced go through what is not linear."""
    second = """[up2] u2 = MatMul(y1, w1)
    [bend2] b2 = Tanh(u2)
    [down2] a2 = MatMul(b2, w2)
    [other2] m2 = MatMul(b2, w3)
    [less] p2 = Sub(y1, a2)
    [join2] j2 = Add(p2, m2)
    [end2] y = Tanh(j2)"""
    proto = with_weights(
        CHAIN.format(through="p = Add(a, x)").replace("y = Tanh(j)", f"y1 = Tanh(j)\n    {second}"), PRODUCTS
    )
    rows = "sharding: {'up{,2}': colwise, 'down{,2}': rowwise, 'other{,2}': rowwise}\n"
    program = compiled(proto, f"ranks: 2\noutputs: cut\n{rows}", tmp_path / "build")
    assert [event.name for event in program.events] == ["j", "j2"]
    assert check_artifact(tmp_path / "build") == []
    without(tmp_path / "build", tag)
    assert any(
        "is a partial sum that no collective has reduced" in str(one) for one in check_artifact(tmp_path / "build")
    )


def test_nothing_is_dearer_than_where_sums_are_reduced_at_once() -> None:
    moved = Counter[str]()

    @settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(chains())
    def one(case: tuple[onnx.ModelProto, str]) -> None:
        proto, plan = case
        try:
            program = same_as_whole(
                proto, plan, {"x": normal(6, WIDTH)}, {"x": normal(12, WIDTH)}, rtol=1e-4, atol=1e-4
            )
        except CompileError:
            moved["refused"] += 1
            return
        with at_once():
            before = passes(proto, plan)
        (count, amount), (counted, amounted) = costs(program), costs(before)
        assert count <= counted
        assert amount <= amounted
        moved["moved" if (count, amount) != (counted, amounted) else "same"] += 1

    one()
    assert moved["moved"] >= 2, moved
    assert moved["refused"] <= 5, moved
