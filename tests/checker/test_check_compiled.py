"""The checker on what the compiler makes: it accepts all of that, and tells what is changed in it though the hashes fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from equivalence import compiled, model
from mutated import change_file, change_manifest, texts
from onnx import ModelProto

RELU = model("""<ir_version: 10, opset_import: ["": 21]> g (float[4, 2] x) => (float[4, 2] y) { [relu] y = Relu(x) }""")
TRAINED = "train:\n  loss: {type: l1, prediction: y, target: labels}\n  optimizer: {type: sgd, lr: 0.1}\n"


def made(folder: Path, proto: ModelProto, plan: str) -> Path:
    """The artifact of a model, which the checker accepts."""
    compiled(proto, plan, folder)
    assert texts(folder) == ""
    return folder


SHAPES = {
    "a shape of a cut input": (
        """g (float[8, 6] x) => (float[8, 4] y) {
        s = Shape(x)  t = Transpose <perm = [1, 0]> (x)  r = Reshape(t, s)  m = MatMul(r, w)  y = Add(m, b) }""",
        "ranks: 4\ndataset: data_parallel\nsharding:\n  mm: {in: [[1, 1], [1, 2]]}\n",
    ),
    "positions by the length of a dynamic input": (
        """g (float[n, 6] x) => (float[n, 4] y) {
        size = Shape <start = 1> (x)  zero = Constant <value_int = 0> ()  one = Constant <value_int = 1> ()
        end = Squeeze(size)  at = Range(zero, end, one)  rows = Gather(w, at)
        h = MatMul(x, rows)  y = Add(h, b) }""",
        "ranks: 4\ndataset: data_parallel\nsymbols: {n: {divisor: 4}}\n",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_depends_on_a_shape_alone_is_equal_where_shapes_are(tmp_path: Path, name: str) -> None:
    text, plan = SHAPES[name]
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    for weight, dims in (("w", [6, 4]), ("b", [4])):
        size = dims[0] * (dims[1] if len(dims) > 1 else 1)
        proto.graph.initializer.append(onnx.helper.make_tensor(weight, 1, dims, [0.125 * k for k in range(size)]))
    for node in proto.graph.node:
        node.name = {"MatMul": "mm"}.get(node.op_type, node.output[0])
    made(tmp_path / "build", proto, plan + TRAINED)


@pytest.mark.parametrize("ratio", [0, 0.25])
def test_a_dropout_of_replicas_draws_the_same(tmp_path: Path, ratio: float) -> None:
    """One that drops nothing stays the standard's op, without the input that makes it draw."""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
g (float[n, 4] x) => (float[n, 3] y) <float ratio = {{{ratio}}}, bool on = {{1}}> {{
    [up] h = MatMul(x, w)  [drop] d = Dropout(h, ratio, on)  [down] y = MatMul(d, v) }}""")
    for weight, dims in (("w", [4, 4]), ("v", [4, 3])):
        numbers = [0.125 * k for k in range(dims[0] * dims[1])]
        proto.graph.initializer.append(onnx.helper.make_tensor(weight, 1, dims, numbers))
    made(tmp_path / "build", proto, 'ranks: 2\nplacement: {"*": [0, 1]}\n' + TRAINED)


def test_an_output_of_unknown_rank_is_accepted(tmp_path: Path) -> None:
    text = """g (float[3, 2] x) => (float[3, 2] y) <int64 k = {0}> {
    s = SequenceConstruct(x, x)  y = SequenceAt(s, k) }"""
    made(tmp_path / "build", model(f'<ir_version: 10, opset_import: ["": 21]> {text}'), "ranks: 1")


def test_a_split_of_a_dim_that_may_be_smaller_than_its_outputs_is_accepted(tmp_path: Path) -> None:
    proto = model("""<ir_version: 10, opset_import: ["": 21]> g (float[4, n, 6] x) => (float[4, m, 6] a, float[4, l, 6] c) {
        [split] a, b, c = Split <axis = 1, num_outputs = 3> (x) }""")
    made(tmp_path, proto, "ranks: 2\nsharding:\n  split: {in: [[1, 1, 2]]}\n")


def test_windows_over_a_dim_that_may_be_smaller_are_accepted(tmp_path: Path) -> None:
    text = """g (float[n, 1, h, w] x) => (float[n, a, b, c] y) <float[2, 1, 3, 3] k = {1,0,0,0,1,0,0,0,1, 1,1,1,1,1,1,1,1,1}> {
        [conv] c = Conv <strides = [2, 2]> (x, k)  [one] p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
        [two] y = AveragePool <kernel_shape = [3, 3]> (p) }"""
    proto = model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    made(tmp_path, proto, "ranks: 2\nplacement: {conv: 0, one: 1, two: 0}\n")


def test_an_op_that_only_onnxruntime_has_is_accepted(tmp_path: Path) -> None:
    text = """g (float[4, 6] x) => (float[4, 6] y) <float[6] w = {1, 2, 3, 4, 5, 6}> {
    y = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001> (x, w) }"""
    made(tmp_path / "build", onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}'), "ranks: 1")


@pytest.fixture
def exchanged(tmp_path: Path) -> Path:
    return made(tmp_path / "build", RELU, "ranks: 2\nsharding:\n  relu: {in: [[2, 1]]}\n")


def test_an_exchange_taken_out_of_a_rank_that_gives_is_refused(exchanged: Path) -> None:
    def change(model: ModelProto) -> None:
        nodes = model.graph.node
        nodes.remove(next(node for node in nodes if node.op_type == "Exchange"))

    change_file(exchanged, "rank_0001.onnx", change)
    assert "it takes a box from rank 1, which has no such node" in texts(exchanged)


def test_boxes_that_overlap_are_refused(exchanged: Path) -> None:
    def change(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Exchange")
        boxes = next(one for one in node.attribute if one.name == "recv_boxes")
        boxes.ints[:] = [*boxes.ints[:6], *boxes.ints[:6]]

    change_file(exchanged, "rank_0000.onnx", change)
    assert "the boxes that it takes from ranks 0 and 1 overlap" in texts(exchanged)


LAYERS = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
g (float[n, 8] x) => (float[n, 8] y) {
    [up] h = MatMul(x, v)  [shift] s = Add(h, b)  [down] y = MatMul(s, w) }""")


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    proto = ModelProto()
    proto.CopyFrom(LAYERS)
    for name, dims in (("v", [8, 24]), ("b", [24]), ("w", [24, 8])):
        size = dims[0] * (dims[1] if len(dims) > 1 else 1)
        proto.graph.initializer.append(onnx.helper.make_tensor(name, 1, dims, [0.01 * k for k in range(size)]))
    return made(tmp_path / "build", proto, "ranks: 3\nsharding:\n  up: colwise\n  down: rowwise\n")


def test_a_type_that_no_node_makes_is_refused(cut: Path) -> None:
    def another(type: int) -> None:
        def change(model: ModelProto) -> None:
            port = next(one for one in model.graph.value_info if one.name == "s")
            port.type.tensor_type.elem_type = type

        change_file(cut, "rank_0001.onnx", change)

    another(onnx.TensorProto.INT32)
    assert "Add 'shift' (shift): it makes 's' a tensor(float), and the file declares a tensor(int32)" in texts(cut)


def test_a_shape_that_no_node_makes_is_refused(cut: Path) -> None:
    def change(model: ModelProto) -> None:
        port = next(one for one in model.graph.value_info if one.name == "s")
        port.type.tensor_type.shape.dim[1].dim_value = 5

    change_file(cut, "rank_0001.onnx", change)
    assert "it makes 's' of [1, 8] with {'n': 1}, and the file declares [n, 5]" in texts(cut)


def test_the_program_of_another_rank_is_refused(cut: Path) -> None:
    change_manifest(cut, lambda data: data.__setitem__("rank_files", [f"rank_000{rank}.onnx" for rank in (0, 1, 1)]))
    assert "rank_0001.onnx: it is the program of ranks 1, and the manifest makes it that of ranks 1-2" in texts(cut)


def test_a_program_of_too_many_nodes_is_not_looked_into(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: ModelProto) -> None:
        model.graph.MergeFrom(onnx.GraphProto.FromString(b"\x0a\x00" * 20_480))

    change_file(cut, "rank_0001.onnx", change)
    monkeypatch.setattr("partc.runtime.checker.graph.rank_file.MOST_NODES", 20_000)
    assert "rank_0001.onnx: it has 20,4" in texts(cut)


def test_the_weights_of_another_rank_are_refused(cut: Path) -> None:
    def change(model: ModelProto) -> None:
        tensor = next(one for one in model.graph.initializer if one.name == "v")
        next(one for one in tensor.external_data if one.key == "location").value = "weights/rank_0002.safetensors"

    change_file(cut, "rank_0001.onnx", change)
    expected = "its data is that of 'v[0:8, 16:24]' in weights/rank_0002.safetensors; it is 'v[0:8, 8:16]'"
    assert expected in texts(cut)


def test_the_bytes_of_another_tensor_are_refused(cut: Path) -> None:
    def change(model: ModelProto) -> None:
        places = {
            one.name: next(entry for entry in one.external_data if entry.key == "offset")
            for one in model.graph.initializer
            if one.external_data
        }
        places["w"].value = places["v"].value

    change_file(cut, "rank_0001.onnx", change)
    assert (
        "weight 'w': its data is that of 'v[0:8, 8:16]' in weights/rank_0001.safetensors; it is 'w[8:16, 0:8]'"
        in texts(cut)
    )


def test_numbers_of_another_rank_inside_the_file_are_refused(cut: Path) -> None:
    other = onnx.load(cut / "rank_0002.onnx", load_external_data=False)
    moved = next(one for one in other.graph.initializer if one.name == "b").raw_data

    def change(model: ModelProto) -> None:
        next(one for one in model.graph.initializer if one.name == "b").raw_data = moved

    change_file(cut, "rank_0001.onnx", change)
    assert "weight 'b': its numbers are not those of 'b[8:16]'" in texts(cut)


def test_a_number_of_ranks_that_no_one_has_is_told_at_once(cut: Path) -> None:
    change_manifest(cut, lambda data: data.__setitem__("ranks", 10**12))
    assert "ranks: Input should be less than or equal to 65536" in texts(cut)
    change_manifest(cut, lambda data: data.__setitem__("ranks", 10**4))
    assert "10000" in texts(cut)


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(one for one in node.attribute if one.name == name)


def every_file(folder: Path, change: Callable[[ModelProto], None]) -> None:
    for file in sorted(folder.glob("rank_*.onnx")):
        change_file(folder, file.name, change)


def test_a_reduction_that_its_terms_do_not_have_is_refused_on_all_ranks(cut: Path) -> None:
    def change(model: ModelProto) -> None:
        attribute(next(node for node in model.graph.node if node.op_type == "Reduce"), "reduce").s = b"max"

    every_file(cut, change)
    expected = "Reduce of 'y', does not make its second layout of its first: its max is not the reduction of its partial values, sum"
    assert expected in texts(cut)


def test_boxes_of_one_size_that_change_places_are_refused(exchanged: Path) -> None:
    def change(model: ModelProto) -> None:
        peers = attribute(next(node for node in model.graph.node if node.op_type == "Exchange"), "recv_boxes")
        peers.ints[:] = [*peers.ints[6:], *peers.ints[:6]]

    change_file(exchanged, "rank_0000.onnx", change)
    expected = "rank 0 gives [0 to 1/2, 0 to 1] of the value, and rank 0 takes it as [1/2 to 1, 0 to 1]"
    assert expected in texts(exchanged)


def test_a_list_of_ranks_in_another_order_is_refused(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[8, 4] x) => (float[8, 4] z) {
    [relu] y = Relu(x)  [softmax] z = Softmax <axis = 0> (y) }"""
    plan = "ranks: 4\nsharding:\n  relu: {in: [[4, 1]]}\n  softmax: {in: [[1, 1]]}\n"
    folder = made(tmp_path / "build", model(text), plan)
    change_manifest(folder, lambda data: next(iter(data["groups"].values()))[0].reverse())
    assert "does not follow" in texts(folder)
