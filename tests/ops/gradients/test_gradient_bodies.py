"""Bodies of branches and loops: gradients flow into them, against central differences; what cannot is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from dealt import dealt
from gradient_bodies_case import HEAD, LOOPED, PLANS, TRAIN, steps, trained_source
from partc.compiler.autodiff.builder import NoGradient
from partc.compiler.autodiff.engine import Backward, differentiate_nodes
from training_equivalence import run, same_tensors, same_training

IF = (
    HEAD
    + """branches (double[3, 5] x, double[5] w, double[3, 1] v, bool c) => (double[3, 5] y) {
  h = Mul(x, w)
  b = If (c) <
    then_branch = one () => (double[3, 5] t) {
      two = Constant <value = double {2.0}> ()
      s = Mul(h, h)
      t = Mul(s, two)
    },
    else_branch = other () => (double[3, 5] e) <double[5] k = {1.0, 2.0, -1.0, 0.5, 3.0}> {
      r = Tanh(x)
      q = Mul(r, k)
      e = Add(q, v)
    }>
  y = Tanh(b)
}
"""
)
SEVERAL = (
    HEAD
    + """several (double[n, 5] x, double[5] w, bool c, bool d) => (double[n, 5] y, double[n, 5] z) {
  y, z = If (c) <
    then_branch = one () => (double[n, 5] p, double[n, 5] q) {
      p = Mul(x, w)
      q = If (d) <
        then_branch = deep () => (double[n, 5] a) { a = Mul(p, p) },
        else_branch = flat () => (double[n, 5] b) { b = Sin(w_wide) }>
    },
    else_branch = other () => (double[n, 5] e, double[n, 5] f) {
      e = Identity(x)
      f = Exp(x)
    }>
}
""".replace("w_wide", "p")
)
SCAN = (
    HEAD
    + """recurrent (double[2, 3] h0, double[{t}, 2, 3] x, double[3, 3] w, double[3] b) => (double[2, 3] h, double[{t}, 2, 3] y) {{
  g0 = Tanh(h0)
  h, y = Scan <num_scan_inputs = 1{more}, body = turn (double[2, 3] a, double[2, 3] one) => (double[2, 3] after, double[2, 3] out) {{
    m = MatMul(a, w)
    n = Add(m, one)
    s = Add(n, b)
    after = Tanh(s)
    out = Mul(after, one)
  }}> (g0, x)
}}
"""
)
LOOP = (
    HEAD
    + """powers (double[2, 3] x, double[3] w, int64 trips) => (double[2, 3] last, double[t, 2, 3] all)
<bool go = {1}, double limit = {40.0}> {
  last, all = Loop <body = turn (int64 i, bool on, double[2, 3] a) => (bool more, double[2, 3] after, double[2, 3] out) {
    n = Cast<to = 11>(i)
    f = Mul(w, n)
    p = Sin(f)
    q = Mul(a, p)
    after = Add(q, x)
    out = Mul(after, after)
    sum = ReduceSum<keepdims = 0>(out)
    more = Less(sum, limit)
  }> (trips, go, x)
}
"""
)


def parsed(text: str) -> ir.Graph:
    return ir.from_proto(onnx.parser.parse_model(text)).graph


def evaluate(
    nodes: list[ir.Node], feeds: dict[str, np.ndarray], constants: dict[str, np.ndarray], outputs: list[str]
) -> dict[str, np.ndarray]:
    """What nodes make, by onnxruntime; bodies read feeds and constants too."""
    helper = onnx.helper
    ports = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in feeds.items()
    ]
    tensors = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([ir.serde.serialize_node(node) for node in nodes], "gradient", ports, made, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


def gradient(
    text: str, feeds: dict[str, np.ndarray], wanted: list[str]
) -> tuple[Backward, dict[str, np.ndarray], float]:
    """The gradients of all outputs, each with random weights; and the largest relative error of their slope in a random direction."""
    graph, rng = parsed(text), np.random.default_rng(3)
    nodes, outputs = list(graph), [str(value.name) for value in graph.outputs]
    known = {name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value}
    whole = evaluate(nodes, feeds, known, outputs)
    seeds = {f"{name}.dy": rng.standard_normal(whole[name].shape) for name in outputs}
    backward = differentiate_nodes(
        nodes, {name: f"{name}.dy" for name in outputs}, wanted, values=[*graph.inputs, *graph.initializers.values()]
    )
    every = [*backward.forward, *backward.early, *backward.nodes]
    constants = {**known, **backward.constants}
    made = evaluate(every, {**feeds, **seeds}, constants, list(backward.gradients.values()))
    found = {name: made[dx] for name, dx in backward.gradients.items()}
    worst = 0.0
    for name, dx in found.items():
        assert dx.shape == feeds[name].shape
        direction, ends = rng.standard_normal(dx.shape), []
        for step in (1e-6, -1e-6):
            moved = evaluate(nodes, {**feeds, name: feeds[name] + step * direction}, known, outputs)
            ends.append(sum(float((moved[one] * seeds[f"{one}.dy"]).sum()) for one in outputs))
        slope, mine = (ends[0] - ends[1]) / 2e-6, float((dx * direction).sum())
        worst = max(worst, abs(mine - slope) / max(abs(slope), 1e-2))
    return backward, found, worst


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


@pytest.mark.parametrize("which", [True, False])
def test_a_branch(which: bool) -> None:
    feeds = {"x": normal(3, 5), "w": normal(5), "v": normal(3, 1), "c": np.array(which)}
    _, found, worst = gradient(IF, feeds, ["x", "w", "v"])
    assert worst < 1e-6
    assert found["v"].any() is not which
    assert found["w"].any() == which


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_branches_of_several_values_and_within_each_other(which: tuple[bool, bool]) -> None:
    feeds = {"x": normal(4, 5), "w": normal(5), "c": np.array(which[0]), "d": np.array(which[1])}
    _, found, worst = gradient(SEVERAL, feeds, ["x", "w"])
    assert worst < 1e-6
    assert found["w"].any() == which[0]


BACKWARDS = ["scan_input_directions = [1]", "scan_output_directions = [1]"]


@pytest.mark.parametrize("turns", ["4", "t"])
@pytest.mark.parametrize("more", ["", *(f", {one}" for one in (*BACKWARDS, ", ".join(BACKWARDS)))])
def test_a_recurrence(more: str, turns: str) -> None:
    feeds = {"h0": normal(2, 3), "x": normal(4, 2, 3), "w": normal(3, 3), "b": normal(3)}
    _, _, worst = gradient(SCAN.format(t=turns, more=more), feeds, ["h0", "x", "w", "b"])
    assert worst < 1e-6


@pytest.mark.parametrize("trips", [0, 1, 3, 9])
def test_a_loop_whose_end_is_computed(trips: int) -> None:
    feeds = {"x": normal(2, 3), "w": normal(3), "trips": np.array(trips)}
    _, _, worst = gradient(LOOP, feeds, ["x", "w"])
    assert worst < 1e-6


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("d = RandomNormalLike(p)\n  after = Mul(d, w)", "RandomNormalLike in the body of Loop draws other numbers"),
        ("after = Concat<axis = 0>(p, p)", "state 0 of Loop may change its shape from turn to turn: it begins as"),
    ],
)
def test_a_loop_that_is_refused(body: str, why: str) -> None:
    text = f"""{HEAD}grow (double[n, 3] x, double[3] w, int64 trips) => (double[m, 3] last) <bool go = {{1}}> {{
    last = Loop <body = turn (int64 i, bool on, double[k, 3] a) => (bool more, double[j, 3] after) {{
      more = Identity(on)
      p = Mul(a, w)
      {body}
    }}> (trips, go, x)
    }}"""
    with pytest.raises(NoGradient, match=why):
        differentiate_nodes(list(parsed(text)), {"last": "dy"}, ["w"], values=parsed(text).inputs)


def test_a_body_without_a_rule_is_refused() -> None:
    text = f"""{HEAD}all (seq(double[3]) s, double[3] w) => (seq(double[3]) y) {{
      y = SequenceMap <body = one (double[3] a) => (double[3] b) {{ b = Mul(a, w) }}> (s)
    }}"""
    with pytest.raises(NoGradient, match="a gradient does not flow into the body of SequenceMap"):
        differentiate_nodes(list(parsed(text)), {"y": "dy"}, ["w"])


def test_a_body_that_is_not_between_is_left_alone() -> None:
    nodes = list(parsed(IF))
    assert differentiate_nodes(nodes, {"h": "h.dy"}, ["w"]).gradients == {"w": "h.grad.ReduceSum"}


BRANCHES = """[pick] b = If (deep) <
      then_branch = one () => (float[batch, 3] t) { r = Relu(h)
        t = MatMul(r, w2) },
      else_branch = other () => (float[batch, 3] e) { s = MatMul(x, skip)
        f = MatMul(h, w2)
        e = Mul(s, f) }>"""
BOTH = """r = Relu(h)
    t = MatMul(r, w2)
    s = MatMul(x, skip)
    f = MatMul(h, w2)
    e = Mul(s, f)
    b = Where(deep, t, e)"""
SCANNED = """[wide] s0 = MatMul(x, skip)
    [across] d = MatMul(h, w2)
    [axis] zero = Constant <value = int64[1] {0}> ()
    [stack] one = Unsqueeze(d, zero)
    [rows] seq = Concat<axis = 0>(one, one, one)
    [pick] b, every = Scan <num_scan_inputs = 1, body = turn (float[batch, 3] a, float[batch, 3] e)
      => (float[batch, 3] after, float[batch, 3] out) { p = Mul(a, bias)
        q = Add(p, e)
        after = Tanh(q)
        out = Identity(a) }> (s0, seq)"""


def test_a_model_with_branches_trains_as_one_that_chooses(tmp_path: Path) -> None:
    plan = f"ranks: 1\n{TRAIN}"
    have = run(trained_source(BRANCHES), plan, tmp_path / "if", steps())
    want = run(trained_source(BOTH), plan, tmp_path / "where", steps())
    np.testing.assert_allclose([one["loss"] for one in have.outputs], [one["loss"] for one in want.outputs], rtol=1e-5)
    same_tensors(have.after, want.after, want.before, 1e-5)


@pytest.mark.parametrize(("plan", "body"), dealt(PLANS, [LOOPED, BRANCHES, SCANNED]))
def test_bodies_train_on_several_ranks_as_on_one(plan: str, body: str, tmp_path: Path) -> None:
    given = steps() if body is BRANCHES else [{k: a for k, a in one.items() if k != "deep"} for one in steps()]
    same_training(lambda: trained_source(body), PLANS[plan] + TRAIN, tmp_path, given, rtol=1e-5, atol=1e-5)


def test_a_scan_trains_as_a_loop(tmp_path: Path) -> None:
    given = [{k: a for k, a in one.items() if k != "deep"} for one in steps()]
    plan = f"ranks: 1\n{TRAIN}"
    have, want = (run(trained_source(one), plan, tmp_path / one[:4], given) for one in (SCANNED, LOOPED))
    same_tensors(have.after, want.after, want.before, 1e-5)
