"""What `partc plan --tp, --dp, --stages` proposes: the cuts and stages that it recognizes, equal to the whole model, and what it says."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from equivalence import same_as_whole
from onnx import TensorProto, helper, numpy_helper
from partc.cli.commands.plan import command
from partc.compiler.errors import CompileError
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.names import among, patterns
from partc.compiler.proposal.propose import propose
from partc.compiler.proposal.stages import _partition
from partc.runtime.units import size_text
from proposal_case import HIDDEN, WIDTH, WORDS, Graph, ids, source, transformer


@pytest.mark.parametrize(
    ("degrees", "reduces"),
    [
        (Degrees(tp=2), 7),
        (Degrees(tp=3), 7),
        (Degrees(dp=2), 0),
        (Degrees(stages=3), 0),
        (Degrees(tp=2, dp=2, stages=2), 7),
    ],
    ids=["tp 2", "tp 3", "dp", "stages", "all"],
)
def test_a_transformer_is_recognized(degrees: Degrees, reduces: int) -> None:
    """Two AllReduces a layer and one of the table, on every slice of the mesh at once."""
    proto = transformer()
    text, missing = propose(source(proto), "model.onnx", degrees)
    assert not missing
    program = same_as_whole(proto, text, ids(4, 5), ids(2, 3), rtol=1e-4, atol=1e-5)
    assert sum(event.op_type == "AllReduce" for event in program.events) == reduces
    assert {event.op_type for event in program.events} <= {"AllReduce", "Exchange", "Send"}
    assert all(part.steps for part in program.parts)


def test_tokens_are_sharded_over_an_axis_of_their_own() -> None:
    proto = transformer()
    text, missing = propose(source(proto), "model.onnx", Degrees(dp=2, cp=2))
    assert not missing
    assert "mesh: {dp: 2, cp: 2}" in text
    assert "context: {axis: cp}" in text
    program = same_as_whole(proto, text, ids(4, 6), ids(2, 4), rtol=1e-4, atol=1e-5)
    assert {event.op_type for event in program.events} == {"AllGather", "Exchange"}
    gathers = {event.bytes for event in program.events if event.op_type == "AllGather"}
    assert gathers == {f"{WIDTH}*batch*seq"}  # to each of two ranks half of 4 bytes, of half of the records


def test_cuts_are_lines_with_reasons() -> None:
    text, _ = propose(source(transformer()), "model.onnx", Degrees(tp=2))
    rules = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    assert rules == {
        "embed": "rowwise",
        "layers.*.attn.q": "colwise",
        "layers.*.attn.k": "colwise",
        "layers.*.attn.v": "colwise",
        "layers.*.attn.out": "rowwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise",
    }
    assert "# each rank computes 15 of 30 columns in up, contracted in down: 1 AllReduce, 3 times" in text
    assert "# Communication in a step: 7 AllReduce, 1 Exchange." in text


def test_a_head_before_a_loss_of_the_models_own_is_cut() -> None:
    """Three numbers a position are reduced, and no scores are sent."""
    proto = transformer(1, batch=4)
    graph = proto.graph
    (logits,) = graph.output
    order = numpy_helper.from_array(np.array([-1, WORDS]), "flat")
    graph.initializer.append(order)
    graph.node.extend(
        [
            helper.make_node("Reshape", [logits.name, "flat"], ["rows"], "loss.rows"),
            helper.make_node("SoftmaxCrossEntropyLoss", ["rows", "labels"], ["loss"], "loss.entropy", ignore_index=3),
        ]
    )
    graph.input.append(helper.make_tensor_value_info("labels", TensorProto.INT64, [20]))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    text, missing = propose(source(proto), "model.onnx", Degrees(tp=2))
    assert not missing
    assert ("head", "colwise") in {(rule.pattern, rule.style) for rule in parse_plan(text, "plan.yaml").sharding}
    assert "columns, three numbers a position are reduced" in text
    feeds = ids(4, 5) | {"labels": np.arange(20) % 7}
    program = same_as_whole(proto, text, feeds, rtol=1e-5, atol=1e-5)
    sent = [event.op_type for event in program.events]
    assert sent == ["AllReduce"] * 6
    text, _ = propose(source(proto), "model.onnx", Degrees(dp=2))
    trained = 4 * sum(int(np.prod(one.dims)) for one in graph.initializer if one.data_type == TensorProto.FLOAT)
    assert f"# A training sums its gradients over dp besides: {size_text(trained)} to a rank in a step." in text


def test_packed_projections_are_recognized_by_their_split() -> None:
    proto = transformer(2, packed=True)
    text, _ = propose(source(proto), "model.onnx", Degrees(tp=2))
    rules = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    assert (rules["layers.*.attn.qkv"], rules["layers.*.attn.out"]) == ("colwise", "rowwise")
    program = same_as_whole(proto, text, ids(2, 5), rtol=1e-4, atol=1e-5)
    assert sum(event.op_type == "AllReduce" for event in program.events) == 5


def test_what_cannot_be_cut_is_said_and_left_whole() -> None:
    """30 hidden units are no multiple of 4, nor are 6 heads: nothing is left."""
    text, missing = propose(source(transformer(1)), "model.onnx", Degrees(tp=4))
    assert missing == ["no layer can be sharded into 4 over the axis tp; all its ranks would do the same work"]
    assert "(30) is not divisible by 4" in text
    assert not parse_plan(text, "plan.yaml").sharding


def test_stages_are_even_and_keep_members_of_a_list_together() -> None:
    text, _ = propose(source(transformer(6)), "model.onnx", Degrees(stages=3))
    placed = [(rule.pattern, rule.ranks) for rule in parse_plan(text, "plan.yaml").placement]
    assert placed == [
        ("embed", (0,)),
        ("layers.[0-1]", (0,)),
        ("layers.[2-3]", (1,)),
        ("layers.[4-5]", (2,)),
        ("norm", (2,)),
        ("head", (2,)),
    ]


def test_stages_within_slack_are_cut_where_less_goes_over() -> None:
    costs = [0.25, 0.25, 0.25, 0.25]
    assert _partition(costs, [0, 9, 9, 9], 2) == [2]
    assert _partition([0.24, 0.25, 0.02, 0.25, 0.24], [0, 9, 100, 10, 9], 2) == [3]
    assert _partition([0.5, 0.3, 0.2], [0, 1, 1], 3) == [1, 2]


def test_more_stages_than_parts_are_said() -> None:
    _, missing = propose(source(transformer(1)), "model.onnx", Degrees(stages=40))
    assert missing[0].startswith("40 stages: the model has ")


def test_inputs_with_another_first_dim_arrive_whole() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 6] x, float[batch, 6] y, float[6] scale) => (float[batch, 6] z) {
        [a] h = Mul(x, scale)
        [b] z = Add(h, y)
    }"""
    proto = onnx.parser.parse_model(text)
    plan, _ = propose(source(proto), "model.onnx", Degrees(dp=3))
    assert "scale has another first dim and is replicated" in plan
    assert parse_plan(plan, "plan.yaml").dims.symbols["batch"].symbol.divisor == 3
    draw = np.random.default_rng(0).standard_normal
    inputs = {"x": draw((6, 6), np.float32), "y": draw((6, 6), np.float32), "scale": draw(6, np.float32)}
    same_as_whole(proto, plan, inputs, rtol=1e-6, atol=1e-6)


def test_a_fixed_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(CompileError, match=r"'ids' has 5 records, which is not divisible by 2"):
        propose(source(transformer(1, batch=5)), "model.onnx", Degrees(dp=2))


def test_patterns_match_what_was_chosen_and_nothing_else() -> None:
    paths = [f"layers.{k}.{name}.MatMul" for k in range(12) for name in ("q", "out")]
    chosen = [f"layers.{k}.q" for k in (0, 1, 2, 10)]
    assert patterns(chosen, among(paths, chosen)) == ["layers.[0-2,10].q"]
    whole = [f"layers.{k}.q" for k in range(12)]
    (one,) = patterns(whole, among(paths, whole))
    assert one == "layers.*.q"
    assert [path for path in paths if compile_pattern(one).matches(path)] == [f"{path}.MatMul" for path in whole]


def test_the_command_writes_it(tmp_path: Path) -> None:
    onnx.save(transformer(1), tmp_path / "net.onnx")
    result = CliRunner().invoke(
        command, [str(tmp_path / "net.onnx"), "--tp", "2", "--dp", "2", "-o", str(tmp_path / "p")]
    )
    assert result.exit_code == 0, result.output
    assert parse_plan((tmp_path / "p").read_text(), "p").mesh == (("dp", 2), ("tp", 2))


def with_sizes(heads: int = 2, norm: bool = False) -> onnx.ModelProto:
    """Attention as torch writes it for a dynamic length: targets of Reshape and a mask made of the sizes of activations."""
    g = Graph()
    h = g.node("norm.Norm", "LayerNormalization", "x", g.weight("norm.weight", WIDTH)) if norm else "x"
    made = {}
    size = WIDTH // heads
    for name in "qkv":
        one = g.node(f"{name}.MatMul", "MatMul", h, g.weight(f"{name}.weight", WIDTH, WIDTH))
        dims = [g.node(f"{name}.dim{k}", "Shape", one, start=k, end=k + 1) for k in range(2)]
        target = g.node(f"{name}.target", "Concat", *dims, g.integers(f"{name}.heads", -1, size), axis=0)
        made[name] = g.node(
            f"{name}.turn", "Transpose", g.node(f"{name}.view", "Reshape", one, target), perm=(0, 2, 1, 3)
        )
    lengths = [
        g.node(f"length.{name}", "Shape", made[name], start=2, end=3) for name in "qk"
    ]  # sizes of values that are cut by heads
    count = g.node("count", "Size", made["v"])
    square = g.node("square.shape", "Concat", *lengths, axis=0)
    ones = g.node("mask", "ConstantOfShape", square)
    sized = g.node("counted", "Cast", count, to=1)
    bias = g.node("bias", "Mul", ones, sized)
    turned = g.node("k.turned", "Transpose", made["k"], perm=(0, 1, 3, 2))
    scores = g.node("masked", "Add", g.node("scores", "MatMul", made["q"], turned), bias)
    mixed = g.node("mixed", "MatMul", g.node("shares", "Softmax", scores), made["v"])
    back = g.node("back", "Transpose", mixed, perm=(0, 2, 1, 3))
    joined = g.node("joined", "Reshape", back, g.integers("joined.target", 0, 0, WIDTH))
    out = g.node("o.MatMul", "MatMul", joined, g.weight("o.weight", WIDTH, WIDTH))
    y = g.node("residual", "Add", "x", out)
    graph = helper.make_graph(
        g.nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", WIDTH])],
        [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["batch", "seq", WIDTH])],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("norm", [False, True], ids=["without a norm", "with a norm"])
def test_who_reads_sizes_sums_nothing(norm: bool) -> None:
    """One AllReduce. Without a norm the residual could be cut, too, for three AllReduces and a gathered output."""
    proto = with_sizes(norm=norm)
    text, missing = propose(source(proto), "model.onnx", Degrees(tp=2))
    rules = {rule.pattern: rule.style for rule in parse_plan(text, "plan.yaml").sharding}
    assert not missing
    assert rules == {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    x = np.random.default_rng(1).standard_normal((2, 5, WIDTH), np.float32)
    program = same_as_whole(proto, text, {"x": x}, rtol=1e-4, atol=1e-5)
    assert [event.op_type for event in program.events] == ["AllReduce"]


def test_experts_that_a_router_picks_are_cut_in_their_inner_dim() -> None:
    g = Graph()
    column = g.node("experts.Unsqueeze", "Unsqueeze", "x", g.integers("last", 2))
    ups = g.node("experts.Gather", "Gather", g.weight("up", 4, HIDDEN, WIDTH), "expert")
    h = g.node("experts.Relu", "Relu", g.node("experts.MatMul", "MatMul", ups, column))
    downs = g.node("experts.Gather_1", "Gather", g.weight("down", 4, WIDTH, HIDDEN), "expert")
    made = g.node("experts.Squeeze", "Squeeze", g.node("experts.MatMul_1", "MatMul", downs, h), "last")
    y = g.node("norm", "Softmax", made)
    rows = ["batch", WIDTH]
    x, expert = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT, rows),
        helper.make_tensor_value_info("expert", TensorProto.INT64, rows[:1]),
    )
    graph = helper.make_graph(
        g.nodes, "g", [x, expert], [helper.make_tensor_value_info(y, TensorProto.FLOAT, rows)], g.weights
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    plan, missing = propose(source(proto), "model.onnx", Degrees(tp=2))
    assert not missing
    rules = {rule.pattern: rule.style for rule in parse_plan(plan, "plan.yaml").sharding}
    assert rules == {"experts.MatMul": "colwise", "experts.MatMul_1": "rowwise"}
    inputs = {
        "x": np.random.default_rng(1).standard_normal((5, WIDTH), np.float32),
        "expert": np.array([0, 3, 1, 1, 2]),
    }
    program = same_as_whole(proto, plan, inputs, rtol=1e-4, atol=1e-5)
    assert [event.op_type for event in program.events] == ["AllReduce"]
