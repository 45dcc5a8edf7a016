"""Cut operators: what communication comes of a plan, and that all ranks together give what the whole model gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from equivalence import compiled, model, same_as_whole
from onnx import TensorProto, helper
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from sharded_models import BLOCK_STYLES, block, mlp, with_weights

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape, dtype=np.float32)


def kinds(program: Complete) -> dict[str, int]:
    return dict(Counter(event.op_type for event in program.events))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_two_layer_mlp_is_one_all_reduce(ranks: int) -> None:
    plan = f"ranks: {ranks}\nsharding: {{up: colwise, down: rowwise}}\n"
    program = same_as_whole(mlp(), plan, {"x": normal(5, 6)}, {"x": normal(1, 6)}, rtol=1e-5, atol=1e-6)
    assert kinds(program) == {"AllReduce": 1}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_transformer_block_is_two_all_reduces(ranks: int) -> None:
    plan = f"ranks: {ranks}\nsharding: {{{BLOCK_STYLES}}}\n"
    steps = [{"x": normal(2, 5, 24)}, {"x": normal(1, 3, 24)}]
    program = same_as_whole(block(), plan, *steps, rtol=1e-5, atol=1e-5)
    assert kinds(program) == {"AllReduce": 2}


def test_data_parallel_inference_communicates_nothing() -> None:
    plan = "ranks: 3\nsymbols: {batch: {divisor: 3}}\ndataset: data_parallel\noutputs: {y: cut}\n"
    program = same_as_whole(block(), plan, {"x": normal(6, 5, 24)}, {"x": normal(3, 1, 24)}, rtol=1e-5, atol=1e-5)
    assert kinds(program) == {}


def test_data_parallel_with_outputs_on_one_rank_still_runs_on_all() -> None:
    plan = "ranks: 3\nsymbols: {batch: {divisor: 3}}\ndataset: data_parallel\n"
    program = same_as_whole(block(), plan, {"x": normal(6, 5, 24)}, rtol=1e-5, atol=1e-5)
    assert {placed.groups for placed in program.placement.values() if not placed.follows} == {((0, 1, 2),)}
    assert kinds(program) == {"Exchange": 1}


def test_data_and_tensor_parallel_on_a_mesh() -> None:
    plan = f"""ranks: 6
mesh: {{dp: 2, tp: 3}}
symbols: {{batch: {{divisor: 2}}}}
dataset: data_parallel
sharding: {{{BLOCK_STYLES}}}
outputs: {{y: cut}}
"""
    program = same_as_whole(block(), plan, {"x": normal(4, 5, 24)}, rtol=1e-5, atol=1e-5)
    assert kinds(program) == {"AllReduce": 2}
    assert {len(event.ranks) for event in program.events} == {2}


def test_operator_strategies_by_integers() -> None:
    plan = """ranks: 8
symbols: {batch: {divisor: 8}}
sharding:
  up: {in: [[2, 4], [4, 1]]}
  act: {in: [[4, 1]]}
  down: {in: [[1, 8], [8, 1]]}
"""
    weights = {"up_w": (8, 24), "up_b": (24,), "down_w": (24, 6), "down_b": (6,)}
    from sharded_models import MLP

    proto = with_weights(MLP.replace("batch, 6] x", "batch, 8] x"), weights)
    same_as_whole(proto, plan, {"x": normal(8, 8)}, {"x": normal(24, 8)}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [((2, 3), (3, 2)), ((3, 2), (2, 3)), ((6, 1), (2, 3)), ((1, 6), (6, 1))])
def test_meshes_without_a_common_subdivision(first: tuple[int, int], second: tuple[int, int]) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 12] x) => (float[batch, 12] y) {
        [a] h = Relu(x)
        [b] y = Neg(h)
    }"""
    plan = f"""ranks: 6
symbols: {{batch: {{divisor: 6}}}}
sharding:
  a: {{in: [{list(first)}]}}
  b: {{in: [{list(second)}]}}
"""
    same_as_whole(with_weights(text, {}), plan, {"x": normal(6, 12)}, {"x": normal(18, 12)}, rtol=0, atol=0)


def test_named_axes_and_orders_of_axes() -> None:
    plan = """ranks: 6
mesh: {a: 2, b: 3}
symbols: {batch: {divisor: 6}}
sharding:
  up: {in: [[[b, a], null], [null, null]]}
  act: {in: [[b, a]]}
  down: {in: [[a, b], [b, null]]}
"""
    same_as_whole(mlp(), plan, {"x": normal(12, 6)}, rtol=1e-5, atol=1e-6)


def test_out_strategies_are_honoured() -> None:
    plan = "ranks: 2\nsymbols: {batch: {divisor: 2}}\nsharding:\n  down: {in: [[1, 2], [2, 1]], out: [[2, 1]]}\n"
    program = same_as_whole(mlp(), plan, {"x": normal(4, 6)}, rtol=1e-5, atol=1e-6)
    assert kinds(program)["ReduceScatter"] == 1


EMBEDDING = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch, seq] ids) => (float[batch, seq, 5] y) {
    [emb] e = Gather(table, ids)
    [act] y = Relu(e)
}"""


def test_an_embedding_cut_by_its_vocabulary() -> None:
    plan = "ranks: 3\nsharding:\n  emb: {in: [[3, 1], [1, 1]]}\n"
    ids = RANDOM.integers(-12, 12, (2, 7))
    program = same_as_whole(with_weights(EMBEDDING, {"table": (12, 5)}), plan, {"ids": ids}, rtol=0, atol=0)
    assert kinds(program) == {"AllReduce": 1}
    assert [held.value.shape for part in program.parts for held in part.weights] == [(4, 5)] * 3


CONV = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6, 9, 9] x) => (float[batch, 4, 7, 7] y, float[batch, 1, 1, 1] m) {
    [conv] c = Conv(x, w, b)
    [act] y = Relu(c)
    [mean] m = ReduceMean(y, axes)
}""".replace("Conv(x, w, b)", "Conv <kernel_shape = [3, 3]> (x, w, b)").replace("(y, axes)", "(y, axes)")


def conv() -> object:
    proto = with_weights(CONV, {"w": (4, 6, 3, 3), "b": (4,)})
    import onnx

    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2, 3], np.int64), "axes"))
    return proto


@pytest.mark.parametrize(
    "strategy",
    ["[[1, 2, 1, 1], [1, 2, 1, 1], [1]]", "[[1, 1, 1, 1], [2, 1, 1, 1], [2]]", "[[2, 1, 1, 1], [1, 1, 1, 1], [1]]"],
)
def test_convolutions_and_means_over_what_is_cut(strategy: str) -> None:
    plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\nsharding:\n  conv: {{in: {strategy}}}\n"
    same_as_whole(conv(), plan, {"x": normal(4, 6, 9, 9)}, rtol=1e-5, atol=1e-5)


def test_a_softmax_whose_axis_arrives_cut_is_gathered() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 12] x) => (float[batch, 12] y) {
        [a] h = Relu(x)
        [b] y = Softmax <axis = -1> (h)
    }"""
    plan = "ranks: 3\nsharding:\n  a: {in: [[1, 3]]}\n"
    program = same_as_whole(with_weights(text, {}), plan, {"x": normal(4, 12)}, rtol=1e-6, atol=1e-7)
    assert kinds(program) == {"AllGather": 1}


def test_a_reshape_that_merges_a_cut_dim() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 6, 5] x) => (float[n, 5] y) <int64[2] flat = {-1, 5}> {
        [a] h = Relu(x)
        [r] f = Reshape(h, flat)
        [b] y = Neg(f)
    }"""
    plan = "ranks: 3\nsymbols: {batch: {divisor: 3}}\nsharding:\n  a: {in: [[3, 1, 1]]}\noutputs: {y: cut}\n"
    program = same_as_whole(with_weights(text, {}), plan, {"x": normal(6, 6, 5)}, rtol=0, atol=0)
    assert kinds(program) == {}


def test_placement_and_cuts_in_one_model() -> None:
    plan = f"""ranks: 4
placement:
  norm1: 3
  "w[0-9]": 0
sharding: {{{BLOCK_STYLES}}}
""".replace('  "w[0-9]": 0\n', "  res2: 3\n")
    plan = plan.replace(
        "sharding:",
        "  wq: [0, 1, 2]\n  wk: [0, 1, 2]\n  wv: [0, 1, 2]\n  wo: [0, 1, 2]\n  up: [1, 2]\n  down: [1, 2]\nsharding:",
    )
    program = same_as_whole(block(), plan, {"x": normal(2, 5, 24)}, {"x": normal(3, 2, 24)}, rtol=1e-5, atol=1e-5)
    assert {placed.groups[0] for placed in program.placement.values()} >= {(3,), (0, 1, 2), (1, 2)}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("sharding:\n  up: {in: [[1, 1], [1, 1], [1]]}", ["plan.yaml:3", "the strategy has 3 inputs"]),
        ("sharding:\n  up: {in: [[1, 1, 1], [1, 1]]}", ["plan.yaml:3", "input 0 is cut in 3 dims, but has 2"]),
        ("sharding:\n  up: {in: [[1, 5], [5, 1]]}", ["plan.yaml:3", "5 shards", "8 ranks"]),
        (
            "sharding:\n  up: {in: [[1, 4], [4, 1]]}",
            ["plan.yaml:3", "cannot cut 'x' dim 1 (6) into 4", "6 is not divisible by 4"],
        ),
        (
            "sharding:\n  up: {in: [[8, 1], [1, 1]]}",
            ["plan.yaml:3", "cannot cut 'x' dim 0 (batch) into 8", "batch: {divisor: 8}"],
        ),
        ("sharding:\n  nothing: colwise", ["plan.yaml:3", "'nothing' matches no module or node"]),
        ("placement: {up: 3}\nsharding:\n  up: colwise", ["plan.yaml:4", "runs on rank 3 alone (plan.yaml:2 'up')"]),
        ("sharding:\n  act: colwise", ["plan.yaml:3", "no parameter inside"]),
        (
            "sharding:\n  up: {in: [[1, 1], [1, 1]], parameters: {ghost: [8, 1]}}",
            ["plan.yaml:3", "no parameter 'ghost'"],
        ),
    ],
)
def test_mistakes_in_strategies(plan: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        compiled(mlp(), f"ranks: 8\n{plan}\n", tmp_path / "build")
    for word in words:
        assert word in str(error.value)


SOFT = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 12] x) => (float[batch, 12] y) {
    [a] h = Relu(x)
    [b] y = Softmax <axis = -1> (h)
}"""


def test_strict_refuses_what_nobody_asked_for(tmp_path: Path) -> None:
    from partc.compiler.sharding.values.budget import check_budget

    plan = "ranks: 3\nsymbols: {batch: {max: 10}}\nsharding:\n  a: {in: [[1, 3]]}\n"
    program = compiled(with_weights(SOFT, {}), plan, tmp_path / "build")
    with pytest.raises(CompileError, match=r"AllGather of 32\*batch bytes, read by b"):
        check_budget(replace(program, strict=True))
    asked = compiled(with_weights(SOFT, {}), plan + "  b: replicate\n", tmp_path / "asked")
    check_budget(replace(asked, strict=True))


def test_a_budget_of_bytes(tmp_path: Path) -> None:
    plan = "ranks: 3\nsymbols: {batch: {max: 10}}\nsharding:\n  a: {in: [[1, 3]]}\nmax_reshard_bytes: "
    compiled(with_weights(SOFT, {}), plan + "320\n", tmp_path / "build")
    with pytest.raises(CompileError, match="send 320 bytes to a rank per step, the plan allows 319"):
        compiled(with_weights(SOFT, {}), plan + "319\n", tmp_path / "build")


def test_older_models_are_converted_where_they_are_cut() -> None:
    text = """<ir_version: 8, opset_import: ["" : 12]>
    main (float[batch, 6] x) => (float[batch, 24] y) {
        [up] h = MatMul(x, w)
        [mean] m = ReduceMean <axes = [1], keepdims = 1> (h)
        [sub] s = Sub(h, m)
        [soft] y = Softmax <axis = 1> (s)
    }"""
    plan = "ranks: 3\nsharding: {up: colwise}\n"
    program = same_as_whole(with_weights(text, {"w": (6, 24)}), plan, {"x": normal(5, 6)}, rtol=1e-5, atol=1e-6)
    assert program.model.opset_imports[""] == 18
    assert kinds(program) == {"AllReduce": 1, "AllGather": 1}


def test_bent_reductions_are_cut_in_two_parts() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 12] x) => (float[batch, 1] y) <int64[1] axes = {1}> {
        [a] h = Relu(x)
        [n] y = ReduceL2(h, axes)
    }"""
    for line in ("a: {in: [[1, 3]]}", "n: {in: [[1, 3]]}", "n: {in: [[1, 3], null]}"):
        plan = f"ranks: 3\nsharding:\n  {line}\n"
        program = same_as_whole(with_weights(text, {}), plan, {"x": normal(4, 12)}, rtol=1e-5, atol=1e-6)
        assert kinds(program) == {"AllReduce": 1}, line
    plan = (
        "ranks: 3\nsymbols: {batch: {divisor: 3}}\nsharding:\n  n: {in: [[3, 1], [1]], out: [[3, 1]]}\noutputs: cut\n"
    )
    assert not same_as_whole(with_weights(text, {}), plan, {"x": normal(6, 12)}, rtol=1e-5, atol=1e-6).events


def test_data_parallel_stages_stay_so() -> None:
    plan = """ranks: 4
mesh: {pp: 2, dp: 2}
symbols: {batch: {divisor: 2}}
dataset: data_parallel
placement:
  "up*": {pp: 0}
  act: {pp: 0}
  "down*": {pp: 1}
outputs: cut
"""
    program = same_as_whole(mlp(), plan, {"x": normal(6, 6)}, rtol=1e-5, atol=1e-6)
    assert [(event.op_type, event.ranks) for event in program.events] == [
        ("Send", ((0,), (2,))),
        ("Send", ((1,), (3,))),
    ]


def test_bodies_capture_values_that_are_cut() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 6] x, bool c) => (float[batch, 12] y, float[batch, 12] z) {
        [up] h = MatMul(x, w)
        [act] a = Relu(h)
        [i] y = If(c) <
            then_branch = t () => (float[n, 12] p) { p = Add(a, h) },
            else_branch = e () => (float[n, 12] q) { s = Sub(a, h)
                q = Neg(s) }
        >
        [use] z = Neg(a)
    }"""
    plan = "ranks: 3\nsharding: {up: colwise}\n"
    steps = [{"x": normal(4, 6), "c": np.array(flag)} for flag in (True, False)]
    program = same_as_whole(with_weights(text, {"w": (6, 12)}), plan, *steps, rtol=1e-5, atol=1e-6)
    assert kinds(program)["AllGather"] == 2


@pytest.mark.parametrize(
    ("dataset", "arriving"),
    [
        ('{"past.*.key": [3, 1]}', {"past.0.key", "past.1.key"}),
        ('{past: [3, 1], "past.1": [1, 1]}', {"past.0.key", "past.0.value"}),
        ('{"past.*.{key,value}": [3, 1], "x[0]": [3, 1]}', {"past.0.key", "past.0.value", "past.1.key", "x[0]"}),
    ],
)
def test_inputs_of_the_dataset_are_named_by_patterns(dataset: str, arriving: set[str]) -> None:
    """The later wins; a name that is an input's is that input, whatever characters it has."""
    names = ["x[0]", "past.0.key", "past.0.value", "past.1.key"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in names]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    proto = helper.make_model(
        helper.make_graph([helper.make_node("Sum", names, ["y"], "sum")], "g", inputs, [out]),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    draw = np.random.default_rng(0)
    feeds = {name: draw.standard_normal((6, 4), dtype=np.float32) for name in names}
    plan = f"ranks: 3\nsymbols: {{batch: {{divisor: 3}}}}\ndataset: {dataset}\n"
    program = same_as_whole(proto, plan, feeds, rtol=1e-6, atol=1e-6)
    held = program.parts[1].inputs
    assert {one.version.value.name for one in held if not one.version.layout.is_replicated} == arriving


def test_a_pattern_of_the_dataset_that_names_no_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"plan.yaml:2: the model has no input 'q\*'"):
        compiled(mlp(), 'ranks: 2\ndataset: {"q*": [2, 1]}\n', tmp_path / "build")


def test_the_help_of_a_divisor_keeps_the_declared_one(tmp_path: Path) -> None:
    proto = model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n, 6] x) => (float[n, 6] y) { [act] y = Relu(x) }"""
    )
    plan = "ranks: 5\nsymbols: {n: {divisor: 12}}\nsharding: {act: {in: [[5, 1]]}}\n"
    with pytest.raises(CompileError, match=r"'n' is 12\*N.*not always divisible by 5\n.*declare `n: \{divisor: 60\}`"):
        compiled(proto, plan, tmp_path / "build")
