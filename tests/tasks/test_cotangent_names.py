"""Cotangents are named after their primal: `a.grad`, whoever reads it, and a contribution to a sum by the node that gives it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Call
from partc.compiler.pipeline import step_program
from partc.compiler.plan.read import parse_plan
from sharded_models import with_weights

TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.1}}\n"
CHAIN = (
    "[one] h = MatMul(x, first)",
    "[plus] hs = Add(h, shift)",
    "[turn] hr = Tanh(hs)",
    "[two] y = MatMul(hr, second)",
)
FORK = ("[one] h = MatMul(x, first)", "[left] l = Tanh(h)", "[right] r = MatMul(h, second)", "[join] y = Mul(l, r)")
TIED = ("[one] h = MatMul(x, first)", "[turn] hr = Tanh(h)", "[two] y = MatMul(hr, first)")
WEIGHTS = {"first": (6, 6), "second": (6, 6), "shift": (6,)}
ONE = "ranks: 1\n"


def compiled(nodes: tuple[str, ...], plan: str) -> Complete:
    body = "\n".join(nodes)
    weights = {name: shape for name, shape in WEIGHTS.items() if name in body}
    text = f'<ir_version: 10, opset_import: ["" : 21]>\nmain (float[batch, 6] x) => (float[batch, 6] y) {{\n{body}\n}}'
    proto = with_weights(text, weights)
    for node in proto.graph.node:  # the parser takes no dot
        node.input[:] = [name.replace("_dot_", ".") for name in node.input]
        node.output[:] = [name.replace("_dot_", ".") for name in node.output]
    source = Source(from_proto(proto, Path("model.onnx")))
    return step_program(source, parse_plan(plan if "train:" in plan else plan + TRAIN, "plan.yaml"), "model")


def cotangents(program: Complete, rank: int = 0) -> list[str]:
    """What a rank makes of the network's cotangents, in order: no helper of a node, which has a name of an op or of a constant."""
    made = []
    for step in program.parts[rank].steps:
        names = [str(value) for value in step.makes]
        made += [name for name in names if ".grad" in name and not name.startswith("loss")]
    return [name for name in made if not re.search(r"\.grad\.[A-Z]|\.grad\.(sum|squares)", name)]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (CHAIN, ["hr.grad", "second.grad", "hs.grad", "shift.grad", "first.grad"]),
        (FORK, ["l.grad", "r.grad", "h.grad.right", "second.grad", "h.grad.left", "h.grad", "first.grad"]),
        (TIED, ["hr.grad", "first.grad.two", "h.grad", "first.grad.one", "first.grad"]),
    ],
    ids=["one reader", "two readers", "a parameter of two nodes"],
)
def test_the_names_on_one_rank(nodes: tuple[str, ...], expected: list[str]) -> None:
    assert cotangents(compiled(nodes, ONE)) == expected


def test_terms_of_a_sum_over_ranks_are_partial() -> None:
    data_parallel = "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"
    found = cotangents(compiled(FORK, data_parallel))
    assert {"first.grad.partial", "second.grad.partial", "first.grad", "second.grad"} <= {*found}
    plan = "ranks: 2\nmesh: {tp: 2}\nsharding: {right: {parameters: {second: [null, tp]}}}\n"
    given = ["r.grad", "l.grad.join", "l@[1, 1].grad.right.partial", "second.grad", "l.grad.right", "l.grad"]
    assert cotangents(compiled((*FORK[:2], "[right] r = MatMul(l, second)", "[join] y = Mul(r, l)"), plan))[:6] == given


def test_a_parameter_on_two_ranks_has_a_contribution_of_each_reader() -> None:
    staged = compiled(TIED, "ranks: 2\nplacement: {one: 0, turn: 0, two: 1}\n")
    assert cotangents(staged, 0) == ["hr.grad", "h.grad", "first.grad.one", "first.grad.two", "first.grad"]
    assert cotangents(staged, 1) == ["hr.grad", "first.grad.two", "first.grad"]


def test_names_that_the_model_has_itself_are_left_to_it() -> None:
    nodes = ("[one] h_dot_grad = MatMul(x, first)", "[turn] h = Tanh(h_dot_grad)", "[two] y = MatMul(h, second)")
    assert cotangents(compiled(nodes, ONE)) == ["h.grad", "h.grad'", "second.grad", "h.grad.grad", "first.grad"]


def test_a_node_called_like_the_kept_sum_of_gradients_contributes_beside_it() -> None:
    nodes = ("[one] h = MatMul(x, first)", "[turn] hr = Tanh(h)", "[sum] y = MatMul(hr, first)")
    plan = ONE + "symbols: {batch: {divisor: 2}}\n" + TRAIN.replace("optimizer", "accumulate: 2, optimizer")
    calls = [step for step in compiled(nodes, plan).parts[0].steps if isinstance(step, Call)]
    (body,) = {call.body for call in calls if call.body.kind == "B"}
    made = [
        str(one) for step in body.steps for one in step.makes if re.match(r"(hr|h|first)\.grad(?!\.[A-Z])", str(one))
    ]
    assert made == ["hr.grad", "first.grad.sum@0", "h.grad", "first.grad.one", "first.grad", "first.grad.sum.next"]
