"""Nodes of one name are one node on all ranks and in all programs, and a weight is the tensor that it is called after."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from decoders import decoder as decoder_of
from equivalence import compiled
from mutated import change_file, rewrite_raw, texts
from onnx import ModelProto, NodeProto, helper
from partc.compiler.pipeline import compile_model, compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.format import FACTORS
from semantic_mutants import build
from small_training import DATA_PARALLEL
from small_training import compiled as trained
from training_equivalence import from_text


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build("generation", tmp_path_factory.mktemp("decoder") / "build")
    assert texts(folder) == ""
    return folder


def node(model: ModelProto, name: str) -> NodeProto:
    return next(one for one in model.graph.node if one.name == name)


def another_op(model: ModelProto) -> None:
    node(model, "layers.1.Add").op_type = "Sub"


def another_scale(model: ModelProto) -> None:
    next(one for one in node(model, "generate.attention").attribute if one.name == "scale").f = 0.5


def another_operand(model: ModelProto) -> None:
    node(model, "layers.1.Add").input[0] = "embed.Add"


def another_constant(model: ModelProto) -> None:
    tensor = next(one for one in model.graph.initializer if one.name == "axes_0")
    tensor.raw_data = (1).to_bytes(8, "little")
    del tensor.metadata_props[1:]


def swapped_weights(model: ModelProto) -> None:
    one, two = (next(x for x in model.graph.initializer if x.name == f"layers.{k}.o.weight") for k in (0, 1))
    one.name, two.name = two.name, one.name


def without(model: ModelProto, reduced: str) -> None:
    call = next(one for one in model.graph.node if one.op_type == "AllReduce" and one.output[0] == reduced)
    call.op_type, call.domain = "Identity", ""
    del call.attribute[:]


DECODE, PREFILL = ("rank_0000.onnx", "rank_0001.onnx"), ("prefill_rank_0000.onnx", "prefill_rank_0001.onnx")
RANK_1 = DECODE[1:] + PREFILL[1:]


@pytest.mark.parametrize(
    ("files", "change", "fact"),
    [
        (RANK_1, another_op, "'layers.1.Add' (layers.1.Add): it is "),
        (DECODE, another_scale, "'generate.attention' (generate.attention): its attribute scale differs from that in"),
        (PREFILL, another_operand, "Add 'layers.1.Add' (layers.1.Add): its operand '"),
        (RANK_1, another_constant, "'axes_0' has other numbers than in another file"),
        (DECODE, swapped_weights, "weight 'layers.1.o.weight': its data is that of 'layers.0.o.weight"),
    ],
)
def test_what_ranks_and_programs_have_alike(
    decoder: Path, tmp_path: Path, files: Sequence[str], change: Callable[[ModelProto], None], fact: str
) -> None:
    shutil.copytree(decoder, tmp_path / "build")
    for file in files:
        change_file(tmp_path / "build", file, change)
    assert fact in texts(tmp_path / "build")


def test_the_largest_of_each_shard_is_not_that_of_all(decoder: Path, tmp_path: Path) -> None:
    """The reduction by which ranks agree on the likeliest token is away in all programs, and in the manifest."""
    shutil.copytree(decoder, tmp_path / "build")
    for file in (*DECODE, *PREFILL):
        change_file(tmp_path / "build", file, lambda model: without(model, "generate.top"))
    rewrite_raw(tmp_path / "build", lambda data: forget(data, "generate.top"))
    found = texts(tmp_path / "build")
    fact = "'generate.top' is the largest of a shard that no collective has reduced, and Equal reads it as that of all"
    assert fact in found


def forget(data: dict[str, Any], reduced: str) -> None:
    for program in data["programs"].values():
        program["collectives"] = [one for one in program["collectives"] if one["value"] != reduced]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build("pipeline", tmp_path_factory.mktemp("training") / "build")
    assert texts(folder) == ""
    return folder


def in_tasks(model: ModelProto, name: str) -> list[NodeProto]:
    return [one for task in model.functions for one in task.node if one.name.startswith(name)]


def another_slope(model: ModelProto) -> None:
    for one in in_tasks(model, "layers.1.mlp.gelu.Gelu.grad.float32_0.3989"):
        one.attribute[0].t.raw_data = np.float32(0.4).tobytes()


def another_backward_op(model: ModelProto) -> None:
    for one in in_tasks(model, "layers.1.norm2.LayerNormalization.grad.Sub2"):
        one.op_type = "Add"


@pytest.mark.parametrize("change", [another_slope, another_backward_op])
def test_layers_that_are_equal_have_equal_gradients(
    training: Path, tmp_path: Path, change: Callable[[ModelProto], None]
) -> None:
    shutil.copytree(training, tmp_path / "build")
    change_file(tmp_path / "build", "rank_0001.onnx", change)
    assert "both are gradients of one function" in texts(tmp_path / "build")


def test_a_part_of_a_weight_that_no_rank_has(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "build")
    for one, two in (DECODE, PREFILL):
        other = onnx.load(decoder / one, load_external_data=False)

        def take(model: ModelProto, other: ModelProto = other) -> None:
            own, given = ({each.name: each for each in one.graph.initializer} for one in (model, other))
            own["layers.1.q.weight"].CopyFrom(given["layers.1.q.weight"])
            for one in model.graph.node:  # else the heads that meet it have other places
                kept = [entry for entry in one.metadata_props if entry.key != FACTORS]
                del one.metadata_props[:]
                one.metadata_props.extend(kept)

        change_file(tmp_path / "build", two, take)
    fact = "weight 'layers.1.q.weight': all ranks have [0:32, 0:16] of it, and another part is on no rank"
    assert fact in texts(tmp_path / "build")


def another_source(model: ModelProto) -> None:
    node(model, "layers.1.mlp.out.Add").input[0] = "layers.1.norm1.LayerNormalization"


def another_loss(model: ModelProto) -> None:
    for one in in_tasks(model, "loss.losses"):
        one.op_type = "Add"


@pytest.mark.parametrize(
    ("file", "change", "fact"),
    [
        (
            "evaluate_rank_0001.onnx",
            another_source,
            "and 'layers.1.norm1.LayerNormalization' in evaluate_rank_0001.onnx",
        ),
        ("evaluate_streamed_rank_0001.onnx", another_loss, "'loss.losses.0' (loss.losses"),
    ],
)
def test_an_evaluation_computes_as_the_training(
    training: Path, tmp_path: Path, file: str, change: Callable[[ModelProto], None], fact: str
) -> None:
    shutil.copytree(training, tmp_path / "build")
    change_file(tmp_path / "build", file, change)
    assert fact in texts(tmp_path / "build")


def test_tokens_that_each_rank_finds_in_its_shard_are_told(decoder: Path, tmp_path: Path) -> None:
    """The reduction by which ranks agree on the first of the likeliest tokens is away in all programs, and in the manifest."""
    shutil.copytree(decoder, tmp_path / "build")
    for file in (*DECODE, *PREFILL):
        change_file(tmp_path / "build", file, lambda model: without(model, "next_token"))
    rewrite_raw(tmp_path / "build", lambda data: forget(data, "next_token"))
    fact = "all ranks have 'next_token' whole, and it is made of 'logits', of which each has another shard"
    assert fact in texts(tmp_path / "build")


def test_attention_may_be_fused_in_a_program(tmp_path: Path) -> None:
    """A window that one token does not leave is causal in the program of one token, and not in that of a chunk."""
    plan = "ranks: 1\ngenerate: {slots: 1, length: 16, chunk: 12}\n"
    compiled(decoder_of(layers=1, fused=True, window=17), plan, tmp_path / "build", check=False)
    assert {"Attention", "GroupQueryAttention"} <= {
        one.op_type
        for file in ("rank_0000.onnx", "prefill_rank_0000.onnx")
        for one in onnx.load(tmp_path / "build" / file, load_external_data=False).graph.node
    }
    assert texts(tmp_path / "build") == ""


SIZED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x, float[batch, 6] t) => (float[batch, 6] y)
    <float[6, 6] w, float[6, 6] u, int64[2] flat = {-1, 3}> {
    [one] h = MatMul(x, w)  [size] s = Shape(h)  [two] f = Reshape(h, flat)  [act] a = Tanh(f)  [back] r = Reshape(a, s)
    [again] c = MatMul(x, u)  [join] y = Add(r, c) }"""
STAGES = """ranks: 2
symbols: {batch: {divisor: 4}}
placement: {one: 0, "{size,two,act,back,again,join}": 1}
pipeline: {microbatches: 2, schedule: 1f1b}
"""


def test_a_shape_may_be_joined_of_sizes_in_a_program(tmp_path: Path) -> None:
    folder = trained(tmp_path / "build", SIZED, STAGES)
    change_file(folder, "evaluate_rank_0001.onnx", join_sizes)
    assert texts(folder) == ""


def join_sizes(model: ModelProto) -> None:
    """The shape of h is that of x in its first dim, and 6."""
    at = next(at for at, one in enumerate(model.graph.node) if one.name == "size")
    del model.graph.node[at]
    nodes = [
        helper.make_node("Shape", ["x"], ["rows"], "rows", start=0, end=1),
        helper.make_node("Constant", [], ["six"], "six", value_ints=[6]),
        helper.make_node("Concat", ["rows", "six"], ["s"], "size", axis=0),
    ]
    for one in reversed(nodes):
        one.metadata_props.add(key="partc.path", value=one.name)
        model.graph.node.insert(at, one)


def test_a_name_may_tell_the_target(tmp_path: Path) -> None:
    """As where a gradient is copied to another target, too, and both are named."""
    folder = trained(tmp_path / "build", SIZED, DATA_PARALLEL)
    change_file(folder, "rank_0001.onnx", name_with_target)
    assert texts(folder) == ""


def name_with_target(model: ModelProto) -> None:
    for one in model.graph.node:
        if not one.domain.startswith("partc.comm"):
            one.metadata_props.add(key="partc.target", value="cpu")
        one.input[:] = [f"{name}.cpu" if name == "f.grad" else name for name in one.input]
    slope = node(model, "f.grad")
    slope.name = slope.output[0] = "f.grad.cpu"
    next(one for one in model.graph.value_info if one.name == "f.grad").name = "f.grad.cpu"


def test_a_mask_is_one_on_all_ranks(tmp_path: Path) -> None:
    """Its sizes may be computed in another way on each rank, and its comparison not."""
    folder = build("encoder", tmp_path / "build")
    change_file(folder, "rank_0001.onnx", lambda model: setattr(node(model, "LessOrEqual"), "op_type", "Less"))
    assert "Less 'LessOrEqual' (LessOrEqual): it is LessOrEqual in rank_0000.onnx" in texts(folder)


def test_equal_nodes_of_other_bounds_have_gradients_of_their_own(tmp_path: Path) -> None:
    """The halves of rotary positions: two slices of one value, whose bounds are tensors of the model."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    agraph (float[batch, 8] x) => (float[batch, 4] logits)
        <float[8, 8] w = {WEIGHTS}, int64[1] zero = {0}, int64[1] half = {4}, int64[1] end = {8}, int64[1] last = {1}> {
        h = MatMul(x, w)
        left = Slice(h, zero, half, last)
        right = Slice(h, half, end, last)
        logits = Sub(left, right)
    }"""
    model = onnx.parser.parse_model(text.replace("WEIGHTS", ", ".join(["0.5"] * 64)))
    for own in model.graph.node:
        own.name = own.output[0]
    onnx.save(model, tmp_path / "model.onnx")
    keys = (
        "loss: {type: softmax_cross_entropy, logits: logits, labels: label}, optimizer: {type: sgd, lr: 0.1}, batch: 4"
    )
    (tmp_path / "plan.yaml").write_text(f"ranks: 1\ntrain: {{{keys}}}\n")
    compile_model(tmp_path / "model.onnx", tmp_path / "plan.yaml", tmp_path / "build")
    assert texts(tmp_path / "build") == ""


WIDENED = """<ir_version: 8, opset_import: ["" : 21]>
net (float[batch, 4] x) => (float[batch, 4] y) {
    [n0] a = MatMul(x, w)
    [n1] b = MatMul(a, w)
    [n2] y = MatMul(b, other) }"""
WIDENED_PLAN = """ranks: 2
symbols: {batch: {divisor: 2}}
placement: {n0: 0, n1: [0, 1], n2: [0, 1]}
sharding: {n1: {in: [[2, 1], null]}}
precision: {compute: bfloat16}
"""


def test_a_weight_that_ranks_widen_for_different_nodes_is_one(tmp_path: Path) -> None:
    """Rank 0 widens `w` for n0, rank 1 for n1; that rank 1 reads another weight there is still found."""
    source = from_text(WIDENED, {"w": (4, 4), "other": (4, 4)})
    compile_source(source, parse_plan(WIDENED_PLAN, "plan.yaml"), tmp_path)
    assert texts(tmp_path) == ""

    def another_weight(model: ModelProto) -> None:
        node(model, "w.bfloat16.read").input[0] = node(model, "other.bfloat16.read").input[0]

    change_file(tmp_path, "rank_0001.onnx", another_weight)
    assert "its operand" in texts(tmp_path)
