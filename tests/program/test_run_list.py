"""Cutting programs into steps: where a cut is made and where none is, and what a broken order says."""

from __future__ import annotations

import time

import onnx
import pytest
from artifact_text import HEAD
from onnx import helper
from partc.runtime import ArtifactError
from partc.runtime.artifact.format import DOMAIN
from partc.runtime.program.steps import Segment, Step
from run_steps import default_steps, steps_of


def steps(text: str) -> list[Step]:
    return steps_of(onnx.parser.parse_model(HEAD + text))


def defaults(text: str) -> list[Step]:
    return default_steps(onnx.parser.parse_model(HEAD + text))


def text(step: Step) -> str:
    if isinstance(step, Segment):
        given = f"{','.join(step.inputs)} -> {','.join(step.outputs)}"
        return f"{' '.join(node.op_type for node in step.nodes)}: {given}" + f" [{','.join(step.initializers)}]" * bool(
            step.initializers
        )
    return f"{type(step).__name__} {step.value} {step.peer}"


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        pytest.param(
            "g (float[n] x) => (float[n] y) { a = Neg(x) b = Abs(a) y = Exp(b) }",
            ["Neg Abs Exp: x -> y"],
            id="no communication, one segment",
        ),
        pytest.param(
            """g (int64[n, 1] i, float[n] x) => (float[2] y)
            {
                s = Constant <value_ints = [2]> ()
                a = Neg(x) z = ConstantOfShape(s) b = ScatterND <reduction: string = "add"> (z, i, a) y = Exp(b)
            }""",
            ["Constant Neg: x -> s,a", "ConstantOfShape ScatterND: s,i,a -> b", "Exp: b -> y"],
            id="what adds at indices is alone with its zeros, in one thread",
        ),
        pytest.param(
            """g (float[n] x) => (float[n] y) { a = Neg(x) = partc.comm.Send <peer=1, tag=0> (a) b = Abs(a) y = Exp(b) }""",
            ["Neg: x -> a", "Send a 1", "Abs Exp: a -> y"],
            id="a send ends the segment of its value",
        ),
        pytest.param(
            """g (float[n] x) => (float[n] y) { a = Neg(x) = partc.comm.Send <peer=1, tag=0> (x) y = Abs(a) }""",
            ["Send x 1", "Neg Abs: x -> y"],
            id="a send of an earlier value goes first and cuts nothing",
        ),
        pytest.param(
            """g (float[n] x) => (float[n] y)
            { a = Neg(x) = partc.comm.Send <peer=1, tag=0> (a) = partc.comm.Send <peer=2, tag=1> (a) y = Abs(a) }""",
            ["Neg: x -> a", "Send a 1", "Send a 2", "Abs: a -> y"],
            id="two sends, one cut",
        ),
        pytest.param(
            """g (float[n] x) => (float[n] y) { a = Neg(x) r = partc.comm.Recv <peer=1, tag=0> () b = Abs(a) y = Add(r, b) }""",
            ["PostRecv r 1", "Neg Abs: x -> b", "WaitRecv r 1", "Add: r,b -> y"],
            id="a receive is posted before the open segment and waited for at its first use",
        ),
        pytest.param(
            """g (float[n] x) => (float[n] y) { r = partc.comm.Recv <peer=1, tag=0> () s = partc.comm.Recv <peer=2, tag=1> ()
            a = Add(s, x) y = Add(a, r) }""",
            ["PostRecv r 1", "PostRecv s 2", "WaitRecv s 2", "Add: s,x -> a", "WaitRecv r 1", "Add: a,r -> y"],
            id="each receive is waited for on its own",
        ),
        pytest.param(
            """g (float[n] x) => (float[n] y) { r = partc.comm.Recv <peer=1, tag=0> () y = Neg(x)
            = partc.comm.Send <peer=2, tag=1> (r) }""",
            ["PostRecv r 1", "Neg: x -> y", "WaitRecv r 1", "Send r 2"],
            id="a value passed on",
        ),
        pytest.param(
            """g (float[n] x) => (float[n] r) { r = partc.comm.Recv <peer=1, tag=0> () a = Neg(x)
            = partc.comm.Send <peer=1, tag=1> (a) }""",
            ["PostRecv r 1", "Neg: x -> a", "Send a 1", "WaitRecv r 1"],
            id="a received output is waited for at the end",
        ),
        pytest.param(
            """g (bool c) => (float[n] y) <float[1] w = {2}> { r = partc.comm.Recv <peer=1, tag=0> () d = Not(c)
            y = If (d) <then_branch = t () => (float[n] a) { b = If (c) <then_branch = u () => (float[n] e) { e = Neg(r) },
            else_branch = v () => (float[n] f) { f = Identity(w) }> a = Abs(b) },
            else_branch = z () => (float[n] k) { k = Identity(r) }> }""",
            ["PostRecv r 1", "Not: c -> d", "WaitRecv r 1", "If: d,c,r -> y [w]"],
            id="what bodies capture counts as an operand, at any depth",
        ),
        pytest.param(
            "g (float[n] x) => (float[n] x) { = partc.comm.Send <peer=1, tag=0> (x) }",
            ["Send x 1"],
            id="nothing to compute",
        ),
        pytest.param(
            "g (float[n] x) => (float[n] a) { a = Neg(x) = partc.comm.Send <peer=1, tag=0> (a) b = Abs(a) }",
            ["Neg: x -> a", "Send a 1"],
            id="nobody needs the end",
        ),
    ],
)  # fmt: skip
def test_cuts(graph: str, expected: list[str]) -> None:
    assert [text(step) for step in steps(graph)] == expected


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (
            "g (float[n] x) => (float[n] y) { y = Add(x, r) }",
            "rank.onnx: Add needs the value 'r', which nothing before it makes",
        ),
        (
            "g (float[n] x) => (float[n] y) { y = Add(x, r) r = partc.comm.Recv <peer=1, tag=0> () }",
            "rank.onnx: Add needs the value 'r', which nothing before it makes",
        ),
        (
            "g (float[n] x) => (float[n] y) { y = Neg(x) = partc.comm.Send <peer=1, tag=0> (h) }",
            "rank.onnx: Send needs the value 'h', which nothing before it makes",
        ),
        (
            "g (float[n] x) => (float[n] y) { y = Neg(x) x = partc.comm.Recv <peer=1, tag=0> () y = Abs(x) }",
            "rank.onnx: the value 'x' is defined twice, by a model input and by Recv\n"
            "rank.onnx: the value 'y' is defined twice, by Neg and by Abs",
        ),
        ("g (float[n] x) => (float[n] y) { z = Neg(x) }", "rank.onnx: no node makes the output 'y'"),
        (
            "g (float[n] x) => (float[n] y) { y = partc.comm.Gossip <root=1> (x) }",
            "rank.onnx: this partc does not know the op 'partc.comm.Gossip'",
        ),
        (
            "g (float[n] x) => (float[n] y) { y = partc.comm.Recv <peer=1> () }",
            "rank.onnx: Recv is not a Recv with 'peer', 'tag' and one value",
        ),
    ],
)
def test_broken_orders(graph: str, message: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        defaults(graph)
    assert str(caught.value).startswith(message)
    assert str(caught.value).splitlines()[-1].startswith("  help: ")


def test_many_violations_are_counted() -> None:
    graph = "g (float[n] x) => (float[n] y) { " + " ".join(f"y{i} = Neg(r{i})" for i in range(15)) + " y = Neg(x) }"
    with pytest.raises(ArtifactError, match="and 5 more"):
        defaults(graph)


def test_time_is_linear() -> None:
    nodes = []
    for index in range(20_000):
        nodes.append(helper.make_node("Neg", [f"h{index}"], [f"h{index + 1}"]))
        if index % 10 == 0:
            nodes.append(helper.make_node("Send", [f"h{index + 1}"], [], domain=DOMAIN, peer=1, tag=index))
    values = [helper.make_tensor_value_info(name, 1, None) for name in ("h0", "h20000")]
    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:]))
    begun = time.process_time()
    assert len(steps_of(model)) == 4001
    assert len(default_steps(model)) == 4001
    assert time.process_time() - begun < 5
