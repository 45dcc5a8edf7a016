"""Types inside a rank file: what is inferred, and what inferring it may cost."""

from __future__ import annotations

import resource
from collections.abc import Hashable
from pathlib import Path

import onnx
from mutated import change_file
from partc.runtime.artifact.format import Manifest, SymbolRecord
from partc.runtime.artifact.graph.rank_constants import is_rank_constant
from partc.runtime.checker.check import check_artifact
from partc.runtime.checker.graph.kinds import without_known
from partc.runtime.checker.graph.symbols import filled_samples, samples
from partc.runtime.checker.graph.types import check_types
from small_training import PERCEPTRON, compiled

LONG = 4_000_000


def test_a_long_vector_of_integers_costs_nothing() -> None:
    """onnx makes a dim of each of its elements where it follows numbers in vectors: 21 GB at 2^28."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (int64[n] x, float[n] z) => (int64[n] y, float[n, 1] w) {
            one = Constant<value_int=1>()  a = Add(x, one)  y = Mul(a, a)
            s = Shape(z)  last = Constant<value_ints=[1]>()  t = Concat<axis=0>(s, last)  w = Reshape(z, t) }""")
    manifest = Manifest.model_construct(symbols={"n": SymbolRecord(min=LONG)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert check_types("rank_0000.onnx", model, manifest) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_slice_by_rank_is_as_large_as_its_bounds_say(tmp_path: Path) -> None:
    plan = "ranks: 2\nmesh: {dp: 2}\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"
    folder = compiled(tmp_path / "build", PERCEPTRON, plan, "{type: adam, lr: 0.1, shard: dp}")
    assert check_artifact(folder) == []
    wrong: list[str] = []

    def widen(model: onnx.ModelProto) -> None:
        constants = {name for node in model.graph.node if is_rank_constant(node) for name in node.output}
        sliced = next(
            node for node in model.graph.node if node.op_type == "Slice" and not constants.isdisjoint(node.input)
        )
        wrong.append(sliced.output[0])
        declared = next(port for port in model.graph.value_info if port.name == wrong[0])
        declared.type.tensor_type.shape.dim[0].dim_value += 1

    change_file(folder, "rank_0000.onnx", widen)
    assert [one.node.split()[0] for one in check_artifact(folder)] == ["Slice"]
    assert f"it makes '{wrong[0]}' of" in check_artifact(folder)[0].fact


def test_one_side_of_frequencies_is_the_default_of_a_fourier_transform() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 64, 1] x) => (float[n, 7, 9, 2] y) <int64 step = {8}, float[16] window, int64 length = {16}> {
            y = STFT(x, step, window, length) }""")
    model.graph.initializer[1].ClearField("float_data")
    model.graph.initializer[1].float_data.extend([1.0] * 16)
    manifest = Manifest.model_construct(symbols={"n": SymbolRecord(min=1)})
    assert check_types("rank_0000.onnx", model, manifest) == []


def test_sizes_at_which_a_value_is_empty_are_not_tried() -> None:
    manifest = Manifest.model_construct(symbols={"t": SymbolRecord(min=1)})
    sizes = filled_samples(manifest, ["t", "t - 4", "0*t"], 2)
    assert [row["t"] for row in sizes] == [7, 13]
    assert [row["t"] for row in samples(manifest)] == [1, 2, 3]


def test_types_are_inferred_for_one_node_of_a_kind_and_a_wrong_one_is_another_kind() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x, float[4, 6] v, float[6, 4] w) => (float[n, 6] z) <float[n, 6] h, float[n, 4] y> {
            h = MatMul(x, v)  y = MatMul(h, w)  z = MatMul(y, v) }""")
    manifest = Manifest.model_construct(symbols={"n": SymbolRecord(min=1)})
    known: dict[Hashable, int] = {}
    assert [node.output[0] for node in without_known("rank_0000.onnx", model, known).graph.node] == ["h", "y"]
    assert not without_known("rank_0001.onnx", model, known).graph.node
    next(port for port in model.graph.value_info if port.name == "y").type.tensor_type.shape.dim[1].dim_value = 5
    (wrong,) = check_types("rank_0001.onnx", without_known("rank_0001.onnx", model, known), manifest)
    assert wrong.fact.startswith("it makes 'y' of [")
