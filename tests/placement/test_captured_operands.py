"""Bodies: what they read from outside is whole, also where it is an operand of their node; a plan cannot speak of nodes inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from equivalence import compiled, model, same_as_whole
from gradient_bodies_case import LOOPED, PLANS, TRAIN, steps, trained_source
from partc.compiler.errors import CompileError
from training_equivalence import same_training

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
LOOP = """g (float[4, 3] x, int64 m) => (float[4, 3] y) {
  y = Loop (m, "", x) <body = turn (int64 i, bool c, float[4, 3] v) => (bool k, float[4, 3] s) {
    s = Add(v, x)
    k = Identity(c) }>
}"""
SCAN = """g (float[4, 3] x) => (float[4, 3] y, float[4, 3] z) {
  y, z = Scan <num_scan_inputs = 1, body = turn (float[4, 3] a, float[3] e) => (float[4, 3] b, float[3] o) {
    b = Add(a, x)
    o = ReduceMax<keepdims = 0>(x, zero) }> (x, x)
}"""
NESTED = """g (float[4, 3] x, int64 m, bool c) => (float[4, 3] y) {
  y = Loop (m, "", x) <body = turn (int64 i, bool on, float[4, 3] v) => (bool k, float[4, 3] s) {
    p = If (c) <
      then_branch = one () => (float[4, 3] t) { t = Add(v, x) },
      else_branch = other () => (float[4, 3] e) { e = Mul(v, x) }>
    s = Add(p, x)
    k = Identity(on) }>
}"""
NAMED = NESTED.replace("t = Add(v, x)", "[inner] t = Add(v, x)").replace("  y = Loop", "  [outer] y = Loop")
MAPPED = """g (float[4, 3] x) => (float[4, 3] y) {
  parts = SplitToSequence <axis = 0> (x)
  made = SequenceMap (parts, x) <body = one (float[1, 3] a, float[4, 3] b) => (float[1, 3] o) {
    s = Sub(b, x)
    t = Add(x, s)
    u = ReduceSum<keepdims = 1>(t, zero)
    o = Add(u, a) }>
  y = ConcatFromSequence <axis = 0> (made)
}"""
FEEDS = {"m": np.array(2), "c": np.array(True)}


@pytest.mark.parametrize("text", [LOOP, SCAN, NESTED, MAPPED], ids=["Loop", "Scan", "If in Loop", "SequenceMap"])
def test_a_captured_operand_is_whole(text: str) -> None:
    if "zero" in text:
        text = text.replace("{\n", "<int64[1] zero = {0}> {\n", 1)
    proto = model(HEAD + text)
    x = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
    given = {port.name: FEEDS.get(port.name, x) for port in proto.graph.input}
    same_as_whole(proto, "ranks: 2\ndataset: data_parallel\n", given, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS)
def test_a_captured_operand_trains(plan: str, tmp_path: Path) -> None:
    body = LOOPED.replace("Mul(a, bias)", "Mul(a, s0)")
    given = [{name: array for name, array in one.items() if name != "deep"} for one in steps()]
    same_training(lambda: trained_source(body), PLANS[plan] + TRAIN, tmp_path, given, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("line", ["placement: {inner: 1}", "sharding: {inner: {in: [[2, 1], [2, 1]]}}"])
def test_a_plan_speaks_of_a_node_in_a_body(line: str) -> None:
    proto = model(HEAD + NAMED)
    x = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)
    same_as_whole(proto, f"ranks: 2\n{line}\n", {"x": x, **FEEDS}, rtol=1e-6, atol=1e-6)


def test_a_node_in_a_body_has_no_target_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(model(HEAD + NAMED), "ranks: 2\ntarget: {'inn*': cuda}\n", tmp_path / "build")
    told = "plan.yaml:2: target of 'inn*', and the body of 'outer' is between borders\n  a program whose bodies"
    assert str(caught.value).startswith(told)
