"""The checker on places and terms: shards that meet in the wrong place, and sums that no collective makes whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from check_places_case import without
from equivalence import compiled
from mutated import change_file, change_manifest, correct, texts
from mutation_kinds import KINDS, Kind, build
from onnx import ModelProto
from partc.runtime.artifact.format import FACTORS, MANIFEST
from partc.runtime.checker.check import check_artifact
from small_training import compiled as trained

BLOCKS = """<ir_version: 10, opset_import: ["": 21]>
g (float[n, 6] x) => (float[n, 6] y) {
    [up] h = MatMul(x, v)  [act] t = Tanh(h)  [down] d = MatMul(t, w)  [join] r = Add(d, x)
    [up2] k = MatMul(r, v)  [act2] u = Tanh(k)  [down2] e = MatMul(u, w)  [join2] y = Add(e, r) }"""
TENSOR_PARALLEL = 'ranks: 2\nsharding: {"up{,2}": colwise, "down{,2}": rowwise, "join{,2}": {in: [[1, 1], [1, 1]]}}\n'


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    proto = onnx.parser.parse_model(BLOCKS)
    for name, dims in (("v", [6, 12]), ("w", [12, 6])):
        proto.graph.initializer.append(onnx.helper.make_tensor(name, 1, dims, [0.01 * k for k in range(72)]))
    compiled(proto, TENSOR_PARALLEL, tmp_path / "build")
    assert texts(tmp_path / "build") == ""
    return tmp_path / "build"


@pytest.mark.parametrize("tag", [0, 1])
def test_a_reduction_that_is_left_out_everywhere_is_told(blocks: Path, tag: int) -> None:
    without(blocks, tag)
    found = texts(blocks)
    assert f"'{'d' if tag == 0 else 'y'}' is a partial sum that no collective has reduced" in found
    assert ("which is replicated, would be added on every rank" in found) == (tag == 0)


def test_a_term_that_is_an_output_is_told(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(BLOCKS)
    del proto.graph.node[3:]
    proto.graph.output[0].name = "d"
    for name, dims in (("v", [6, 12]), ("w", [12, 6])):
        proto.graph.initializer.append(onnx.helper.make_tensor(name, 1, dims, [0.01 * k for k in range(72)]))
    compiled(proto, "ranks: 2\nsharding: {up: colwise, down: rowwise}\noutputs: [0, 1]\n", tmp_path / "build")
    assert texts(tmp_path / "build") == ""
    without(tmp_path / "build", 0)
    assert "'d' is a partial sum that no collective has reduced" in texts(tmp_path / "build")


TWO_BLOCKS = """g (float[n, 6] x) => (float[n, 5] y) {
    [up] h = MatMul(x, v)  [act] t = Tanh(h)  [down] d = MatMul(t, w)  [turn] m = Tanh(d)
    [up2] k = MatMul(m, v2)  [act2] u = Tanh(k)  [down2] y = MatMul(u, w2) }"""
LEARN = """symbols: {n: {divisor: 8}}
dataset: data_parallel
sharding: {"up{,2}": colwise, "down{,2}": rowwise}
train: {loss: {type: softmax_cross_entropy, logits: y, labels: label}, optimizer: {type: adam, lr: 0.1%s}%s}
"""
MESH, STAGES = "ranks: 4\nmesh: {dp: 2, tp: 2}\n", "ranks: 8\nmesh: {pp: 2, dp: 2, tp: 2}\n"
PIPELINE = "pipeline: {microbatches: %d, stages: ['up, act, down', 'turn, up2, act2, down2']}\n"
TRAININGS = {
    "buckets": MESH + LEARN % ("", ""),
    "zero": MESH + LEARN % (", shard: dp", ""),
    "accumulated": MESH + LEARN % ("", ", accumulate: 2"),
    "stages": STAGES + PIPELINE % 1 + LEARN % ("", ""),
    "stages of zero": STAGES + PIPELINE % 1 + LEARN % (", shard: dp", ""),
    "microbatches": STAGES + PIPELINE % 2 + LEARN % ("", ""),
}
OF_TP = (
    "its layout says that ranks 0 and 1 have one term of 'w.grad.partial', and they have two, which no collective adds"
)
OF_A_PART = "'d.grad.0' is a partial sum that no collective has reduced"
OF_DP = "it updates a tensor by 'w2.grad', which is a partial sum that no collective has reduced"


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("reduced", ["m.grad", "w2.grad"])
def test_a_reduction_over_one_axis_that_a_training_lacks_is_told(tmp_path: Path, training: str, reduced: str) -> None:
    """The cotangent `m.grad` is reduced over tp, the gradient `w2.grad` over dp; the other reduction stays."""
    weights = {"v": (6, 12), "w": (12, 8), "v2": (8, 10), "w2": (10, 5)}
    folder = build(Kind(TWO_BLOCKS, weights, TRAININGS[training], {}, {}), tmp_path / "build")
    assert texts(folder) == ""
    records = json.loads((folder / MANIFEST).read_text())["programs"]["train"]["collectives"]
    without(folder, *[one["tag"] for one in records if re.fullmatch(rf"{reduced}(\.\d)?", one["value"])])
    in_parts = training in ("accumulated", "microbatches")
    assert (OF_DP if reduced == "w2.grad" else OF_A_PART if in_parts else OF_TP) in texts(folder)


@pytest.mark.parametrize(
    ("lists", "axis", "taken"), [([[0, 1], [2, 3]], 1, "0 and 2"), ([[0, 2], [1, 3]], 0, "0 and 1")]
)
def test_a_reduction_over_some_of_the_ranks_of_a_sum_is_told(
    tmp_path: Path, lists: list[list[int]], axis: int, taken: str
) -> None:
    plan = "ranks: 4\nsharding: {up: {in: [[1, 4], [4, 1]]}}\noutputs: [0, 1, 2, 3]\n"
    model = "g (float[n, 8] x) => (float[n, 5] y) { [up] y = MatMul(x, v) }"
    folder = build(Kind(model, {"v": (8, 5)}, plan, {}, {}), tmp_path / "build")
    assert texts(folder) == ""

    def change(data: dict[str, Any]) -> None:
        layout = {"ranks": "0-3", "mesh": [2, 2], "cuts": [[], []]}
        given, made = ({**layout, "partial": partial} for partial in ([[axis, "sum"]], []))
        data["collectives"][0] |= {"group": "pairs", "given": given, "made": made, "bytes": "20*n"}
        data["groups"]["pairs"] = lists

    change_manifest(folder, change)
    for path in sorted(folder.glob("rank_*.onnx")):
        change_file(folder, path.name, of_pairs)
    fact = (
        f"its layout says that ranks {taken} have one term of 'y.partial', and they have two, which no collective adds"
    )
    assert fact in texts(folder)


def of_pairs(model: ModelProto) -> None:
    call = next(node for node in model.graph.node if node.op_type == "AllReduce")
    next(one for one in call.attribute if one.name == "group").s = b"pairs"


CUT = "ranks: 2\nsymbols: {n: {divisor: 2}}\ndataset: data_parallel\noutputs: cut\n"


def turned(part: str, at: int) -> Callable[[dict[str, Any]], object]:
    return lambda data: data[part][at]["boxes"].reverse()


@pytest.mark.parametrize(("part", "fact"), [("inputs", "output 'y'"), ("outputs", "output 'y'")])
def test_shards_of_two_ranks_that_change_places_are_told(tmp_path: Path, part: str, fact: str) -> None:
    proto = onnx.parser.parse_model(BLOCKS)
    for name, dims in (("v", [6, 12]), ("w", [12, 6])):
        proto.graph.initializer.append(onnx.helper.make_tensor(name, 1, dims, [0.01 * k for k in range(72)]))
    compiled(proto, CUT, tmp_path / "build")
    assert texts(tmp_path / "build") == ""
    change_manifest(tmp_path / "build", turned(part, 0))
    assert f"the {fact} does not lie along dim 0 where the box of its rank does" in texts(tmp_path / "build")


def test_records_and_labels_of_other_places_are_told(tmp_path: Path) -> None:
    folder = build(KINDS["data parallel"], tmp_path / "build")
    change_manifest(folder, turned("inputs", 0))
    assert "are at different offsets along dim 0: -6 elements apart, and 6 on other ranks" in texts(folder)


def test_what_is_each_ranks_own_is_no_term(blocks: Path) -> None:
    """A node that says of no factor that it is cut, as inside of a local map, is not taken to make terms."""
    without(blocks, 0)
    for path in sorted(blocks.glob("rank_*.onnx")):
        model: ModelProto = onnx.load(path, load_external_data=False)
        for node in model.graph.node:
            kept = [entry for entry in node.metadata_props if entry.key != "partc.cut"]
            del node.metadata_props[:]
            node.metadata_props.extend(kept)
        path.write_bytes(model.SerializeToString(deterministic=True))
    correct(blocks)
    assert texts(blocks) == ""


def test_shape_arithmetic_is_on_each_group_what_fits_there(tmp_path: Path) -> None:
    """Rank 0 is sent x whole and asks it for its shape; rank 1 has a shard of x, and multiplies what it finds."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 6] x) => (float[n, 6] y, float[n, 6] v) <float[6] w = {1, 2, 3, 4, 5, 6}> {
    [size] s = Shape(x)  [expand] e = Expand(w, s)  [abs] f = Abs(x)
    [alone] y = Mul(f, e)  [other] v = Mul(x, e) }""")
    plan = "ranks: 2\nsymbols: {n: {divisor: 2}}\ndataset: data_parallel\noutputs: producer\nplacement: {alone: 0}\n"
    compiled(proto, plan, tmp_path / "build")
    made = [
        next(node.op_type for node in file.graph.node if "s" in node.output) for file in rank_files(tmp_path / "build")
    ]
    assert made == ["Shape", "Mul"]
    assert texts(tmp_path / "build") == ""


def test_a_rank_may_have_one_head(tmp_path: Path) -> None:
    """`[n, 12]` is `[n, 2, 6]` by heads, and `[n, 6]` of a rank `[n, 1, 6]`: the dim of 6 is whole, though its size stays."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
g (float[n, 6] x) => (float[n, 2] z) <int64[3] heads = {0, 2, 6}, int64[1] last = {2}> {
    [up] h = MatMul(x, v)  [split] s = Reshape(h, heads)  [sum] q = ReduceSum <keepdims = 0>(s, last)
    [act] z = Tanh(q) }""")
    proto.graph.initializer.append(onnx.helper.make_tensor("v", 1, [6, 12], [0.01 * k for k in range(72)]))
    compiled(proto, "ranks: 2\nsharding: {up: colwise}\n", tmp_path / "build")
    assert any(node.op_type == "ReduceSum" for node in rank_files(tmp_path / "build")[0].graph.node)
    assert texts(tmp_path / "build") == ""


def rank_files(folder: Path) -> list[ModelProto]:
    return [onnx.load(path, load_external_data=False) for path in sorted(folder.glob("rank_*.onnx"))]


def test_what_two_readers_on_two_groups_give_is_named_by_each(tmp_path: Path) -> None:
    model = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 6] x) => (float[batch, 6] y) <float[6, 6] w> {
        [minus] v = Neg(w)
        [one] a = MatMul(x, v)
        [two] y = MatMul(a, v)
    }"""
    plan = """
ranks: 4
symbols: {batch: {divisor: 2}}
dataset: full_batch
sharding: {one: {in: [null, [1, 2]]}, two: {in: [null, [1, 2]]}}
placement: {one: [0, 1], two: [2, 3]}
"""
    folder = trained(tmp_path / "build", model, plan)
    assert not check_artifact(folder)
    ends = (folder / "ir" / "step_parallel_end.ir").read_text()
    assert "%v.grad.one = Gemm(" in ends
    assert "%v.grad.two = Gemm(" in ends


def test_a_reshard_may_make_on_other_ranks_what_a_node_is_called_on_its_own(tmp_path: Path) -> None:
    """Ranks 2 and 3 cut h out of all of it, since its size is not known; ranks 0 and 1 compute their shards."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
g (float[n, 6] x, int64[2] s) => (float[m, 6] y) { [given] q = Reshape(x, s)
    [up] h = MatMul(q, v)  [act] t = Tanh(h)  [down] y = MatMul(t, w) }""")
    for name, dims in (("v", [6, 12]), ("w", [12, 6])):
        proto.graph.initializer.append(onnx.helper.make_tensor(name, 1, dims, [0.01 * k for k in range(72)]))
    plan = "ranks: 4\nplacement: {up: [0, 1], '{act,down}': [2, 3]}\nsharding: {up: colwise, down: rowwise}\n"
    compiled(proto, plan, tmp_path / "build")
    made = [
        next(node.op_type for node in file.graph.node if "h" in node.output) for file in rank_files(tmp_path / "build")
    ]
    assert made == ["MatMul", "MatMul", "Slice", "Slice"]
    assert texts(tmp_path / "build") == ""


def test_a_sharded_node_that_is_another_one_on_a_rank_is_told(blocks: Path) -> None:
    path = blocks / "rank_0000.onnx"
    model = onnx.load(path, load_external_data=False)
    next(node for node in model.graph.node if node.name == "act").op_type = "Sigmoid"
    path.write_bytes(model.SerializeToString(deterministic=True))
    correct(blocks)
    assert "it is Sigmoid in rank_0000.onnx" in texts(blocks)


@pytest.mark.parametrize("text", ["mkx,kn->mn", "m->m", "anything"])
def test_factors_that_are_not_those_of_the_operands_are_told(blocks: Path, text: str) -> None:
    def change(model: ModelProto) -> None:
        node = next(one for one in model.graph.node if one.name == "down")
        next(entry for entry in node.metadata_props if entry.key == FACTORS).value = text

    for path in sorted(blocks.glob("rank_*.onnx")):
        change_file(blocks, path.name, change)
    assert f"MatMul 'down' (down): its factors '{text}' are not those of its operands" in texts(blocks)


def test_a_row_that_a_rank_picks_of_its_shard_is_no_term(tmp_path: Path) -> None:
    """A scatter into rows that are cut writes what it does not have into one more row, a copy of the shard's first one."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
g (float[n, 6] x, int64[4, 6] ids, float[4, 6] u) => (float[12, 6] y) {
    [twice] z = Add(w, x)  [write] y = ScatterElements <axis = 0> (z, ids, u) }""")
    proto.graph.initializer.append(onnx.helper.make_tensor("w", 1, [12, 6], [0.01 * k for k in range(72)]))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 12
    plan = "ranks: 2\nsharding: {write: {in: [[2, 1], null, null]}}\noutputs: cut\n"
    compiled(proto, plan, tmp_path / "build")
    made = {node.op_type for node in rank_files(tmp_path / "build")[0].graph.node}
    assert {"Gather", "Concat", "ScatterElements"} <= made
    assert texts(tmp_path / "build") == ""
