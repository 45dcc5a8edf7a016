"""Bodies whose turns or branch only the run knows, with ops that are sharded: collectives inside, equal to one device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from body_models import BRANCHES, NESTED, SCAN, WEIGHTS, WHILE, WIDTH, plan, weighed
from equivalence import compiled, counted, same_as_whole, whole_outputs
from partc.compiler.errors import CompileError
from partc.runtime import load_local
from partc.runtime.artifact.comm.schemas import register
from partc.runtime.artifact.graph.onnx_graph import all_nodes


def drawn(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_while_whose_turns_only_the_run_knows_reduces_in_each_turn(ranks: int) -> None:
    steps = [{"x": drawn(4, WIDTH), "tolerance": np.array(limit, np.float32)} for limit in (9.0, 0.3, 0.01, 0.0)]
    proto = weighed(WHILE, WEIGHTS)
    taken = [int(whole_outputs(proto, one)["n"]) for one in steps]
    assert taken[0] == 1 < taken[1] < taken[2] < taken[3] == 40
    program = same_as_whole(proto, plan("refine", ranks), *steps, rtol=1e-4, atol=1e-5, checked=True)
    found = counted(program)
    assert found["Begin"] == found["End"] == 1
    assert found["AllReduce"] >= 1


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_branches_of_a_condition_are_sharded(ranks: int) -> None:
    steps = [{"h": drawn(4, WIDTH), "limit": np.array(limit, np.float32)} for limit in (-9, 9, -9, 9)]
    same_as_whole(weighed(BRANCHES, WEIGHTS), plan("choose", ranks, "h"), *steps, rtol=1e-4, atol=1e-5, checked=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_branch_in_a_loop_and_states_that_change_places(ranks: int) -> None:
    steps = [
        {"x": drawn(4, WIDTH), "turns": np.array(turns), "limit": np.array(limit, np.float32)}
        for turns, limit in ((3, -9), (1, 0), (5, 0.5), (4, 9))
    ]
    same_as_whole(weighed(NESTED, WEIGHTS), plan("outer.body.inner", ranks), *steps, rtol=1e-4, atol=1e-5, checked=True)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("direction", [0, 1])
def test_a_scan_over_a_sequence_of_any_length(ranks: int, direction: int) -> None:
    proto = weighed(SCAN.replace("DIRECTION", str(direction)), WEIGHTS)
    steps = [{"x": drawn(4, WIDTH), "xs": drawn(4, time, WIDTH)} for time in (3, 1, 6)]
    plan_ = plan("rnn", ranks).replace("x: [dp, null]", "x: [dp, null], xs: [dp, null, null]")
    same_as_whole(proto, plan_, *steps, rtol=1e-4, atol=1e-5, checked=True)


def test_without_a_turn_states_are_as_they_begin_and_stacks_are_empty(tmp_path: Path) -> None:
    compiled(weighed(NESTED, WEIGHTS), plan("outer.body.inner", 2), tmp_path)
    x = drawn(4, WIDTH)
    with load_local(tmp_path) as ranks:
        found = ranks({"x": x, "turns": np.array(0), "limit": np.array(0, np.float32)})
    np.testing.assert_array_equal(found["a"], x)
    np.testing.assert_array_equal(found["b"], x)
    assert found["all"].shape == (0, 4, WIDTH)


def test_the_file_has_the_standards_form(tmp_path: Path) -> None:
    """A Loop whose body has the AllReduce, and reads the weights of the graph around; onnx knows its types."""
    compiled(weighed(WHILE, WEIGHTS), plan("refine", 2), tmp_path)
    register()
    file = onnx.load(tmp_path / "rank_0000.onnx")
    onnx.checker.check_model(file)
    (loop,) = (node for node in file.graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g
    assert [node.op_type for node in body.node if node.domain] == ["AllReduce"]
    assert [len(loop.input), len(loop.output), len(body.input), len(body.output)] == [4, 2, 4, 3]
    assert {node.op_type for node in all_nodes(file.graph.node) if node.domain == "partc.comm"} == {"AllReduce"}


TRAIN = "train: {loss: {type: mse, prediction: y, target: t}, optimizer: {type: sgd, lr: 0.1}}\n"
NOT_CUT = "it is not cut as a body in a generation or a pipeline, nor with microbatches, recomputed nodes or stored parameters"
REFUSED = {
    "an op of a body on another rank": (
        'placement: {"refine": 0, "refine.body.up": 1}\n',
        "plan.yaml:2: 'refine.body.up' runs on rank 1, and the Loop around it ('refine') on rank 0",
        "all ops of a body run on the ranks of its node",
        "place 'refine' as a whole",
    ),
    "a body of a training with microbatches": (
        f'sharding: {{"refine.*.up": colwise}}\n{TRAIN.replace("}}", "}, accumulate: 2}")}',
        "plan.yaml:2: 'refine.*.up' matches MatMul 'up' alone, inside of the body of Loop ('refine')",
        NOT_CUT,
        "write 'refine'",
    ),
    "a body that is computed again": (
        f'sharding: {{"refine.*.up": colwise}}\npipeline: {{microbatches: 1, recompute: ["refine.**"]}}\n{TRAIN}',
        "plan.yaml:2: 'refine.*.up' matches MatMul 'up' alone, inside of the body of Loop ('refine')",
        NOT_CUT,
        "write 'refine'",
    ),
    "a body over stored parameters": (
        f'sharding: {{"refine.*.up": {{in: [[], [1, 2]]}}}}\nmesh: {{dp: 2}}\nparameters: {{"**": {{stored: dp}}}}\n{TRAIN}',
        "plan.yaml:2: 'refine.*.up' matches MatMul 'up' alone, inside of the body of Loop ('refine')",
        NOT_CUT,
        "write 'refine'",
    ),
    "a body in a pipeline": (
        f'sharding: {{"refine.*.up": colwise}}\nsymbols: {{batch: {{divisor: 2}}}}\npipeline: {{microbatches: 2}}\n{TRAIN}',
        "plan.yaml:4: not all of the model can run by microbatches: refine (Loop) may bring records of the batch together",
        "a microbatch knows its own records alone",
        "write statistics: microbatch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_line_law_and_remedy(case: str, tmp_path: Path) -> None:
    rules, *said = REFUSED[case]
    with pytest.raises(CompileError) as caught:
        compiled(weighed(WHILE, WEIGHTS), f"ranks: 2\n{rules}", tmp_path)
    for text in said:
        assert text in str(caught.value)


def test_a_state_that_grows_is_refused(tmp_path: Path) -> None:
    text = """net (float[batch, 8] x, int64 turns) => (float[n, 8] y) {
    [grow] y = Loop <body = turn (int64 i, bool on, float[m, 8] h) => (bool on2, float[k, 8] next) {
        on2 = Identity(on)
        [up] u = MatMul(h, W)
        [down] d = MatMul(u, V)
        next = Concat <axis = 0> (d, h) }> (turns, , x) }"""
    with pytest.raises(CompileError) as caught:
        compiled(weighed(text, WEIGHTS), plan("grow", 2), tmp_path)
    assert "what is carried from turn to turn of a body that is cut keeps its shape" in str(caught.value)
