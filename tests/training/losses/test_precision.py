"""`precision` of a plan: what computes in 16 bits, and that it trains as float32 does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from equivalence import compiled, same, whole_outputs
from onnx import numpy_helper
from partc.compiler.comparison.rounding import perturb
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Compute
from partc.runtime import load_local
from partc.runtime.checker.check import check_artifact
from training_equivalence import run as run_training
from training_equivalence import same_training

NETWORK = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 7] h, float[batch, 5] y) {
    [one] a = MatMul(x, w1)
    [plus] b = Add(a, shift)
    [turn] r = Relu(b)
    [two] h = MatMul(r, w2)
    [soft] s = Softmax(h)
    [more] q = Add(s, h)
    [far] t = Add(r, huge)
    [three] y = MatMul(q, w3)
}"""
SHAPES = {"w1": (6, 8), "shift": (8,), "w2": (8, 7), "w3": (7, 5), "huge": ()}
INPUT = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)


def network(kind: type = np.float32, text: str = NETWORK) -> onnx.ModelProto:
    proto, random = onnx.parser.parse_model(text), np.random.default_rng(5)
    for name, shape in SHAPES.items():
        array = random.standard_normal(shape) / 3 if shape else np.array(1e6)
        if f" {name})" in text:
            proto.graph.initializer.append(numpy_helper.from_array(array.astype(kind), name))
    return proto


def types(program: Complete) -> dict[str, str]:
    """By node the types of what it reads and makes, `f16 f16 -> f32`."""
    words = {"FLOAT": "f32", "FLOAT16": "f16", "BFLOAT16": "bf16", "INT64": "i64"}
    found = {}
    for node in program.model.graph:
        sides = [
            [words[value.dtype.name] for value in some if value and value.dtype] for some in (node.inputs, node.outputs)
        ]
        found[node.name or ""] = " -> ".join(" ".join(side) for side in sides)
    return found


def run(proto: onnx.ModelProto, plan: str, out: Path) -> tuple[Complete, dict[str, np.ndarray]]:
    program = compiled(proto, plan, out)
    with load_local(out) as ranks:
        return program, ranks({"x": INPUT})


def test_types_follow_the_table(tmp_path: Path) -> None:
    program, made = run(network(), "ranks: 1\nprecision: {compute: float16, keep: [three]}", tmp_path / "build")
    found = types(program)
    assert found["one"] == found["plus"] == found["two"] == "f16 f16 -> f16"
    assert found["turn"] == "f16 -> f16"
    assert found["soft"] == "f32 -> f32"
    assert found["more"] == found["three"] == "f32 f32 -> f32"
    assert found["far"] == "f32 f32 -> f32", "1e6 is no float16"
    assert {name for name in program.model.graph.initializers if "16" in name} == {
        f"{one}.float16" for one in ("w1", "shift", "w2")
    }
    for name, want in whole_outputs(network(), {"x": INPUT}).items():
        assert made[name].dtype == np.float32
        np.testing.assert_allclose(made[name], want, rtol=0, atol=5e-3)
        assert not np.array_equal(made[name], want)


TURNED = """<ir_version: 10, opset_import: ["" : 21]>
main (float[batch, 6] x) => (float[batch, 8] y, float[batch, 8] z) {
    [turn] v = Transpose(w1)
    [back] u = Transpose(v)
    [one] y = MatMul(x, u)
    [other] r = Transpose(w2)
    [two] p = MatMul(y, w2)
    [norm] s = Softmax(r)
    [three] q = MatMul(y, s)
    [four] t = MatMul(y, r)
    [plus] a = Add(p, q)
    [more] z = Add(a, t)
}"""


def test_weights_are_cast_before_they_are_turned_for_products(tmp_path: Path) -> None:
    """Once a step, and what is read on another device than where it is updated is copied in 16 bits."""
    proto = onnx.parser.parse_model(TURNED)
    for name, shape in {"w1": (6, 8), "w2": (8, 8)}.items():
        array = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    plan = "ranks: 1\nprecision: {compute: float16}"
    found = types(compiled(proto, plan, tmp_path / "build"))
    assert found["turn"] == found["back"] == "f16 -> f16"
    assert found["other"] == "f32 -> f32", "a Softmax reads it, too"
    assert found["two"] == found["three"] == found["four"] == "f16 f16 -> f16"


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_it_is_the_same_wherever_it_is_cut(kind: str, tmp_path: Path) -> None:
    plan = f"precision: {{compute: {kind}}}\n"
    _, want = run(network(), "ranks: 1\n" + plan, tmp_path / "one")
    for k, more in enumerate(("placement: {one: 0, two: 1}", "mesh: {tp: 2}\nsharding: {one: colwise, two: rowwise}")):
        program, made = run(network(), f"ranks: 2\n{more}\n" + plan, tmp_path / str(k))
        assert any(event.value.dtype and event.value.dtype.name == kind.upper() for event in program.events)
        for name, value in want.items():
            same(made[name], value, name, rtol=0, atol=1e-3 if kind == "float16" else 1e-2)
    assert sum("bfloat16 is stored" in text for text in program.warnings) == (kind == "bfloat16")


MISTAKES = {
    "keep: [thre]": "plan.yaml:2: 'thre' matches no module or node of the model\n  help: the nearest names are 'three'",
    "keep: ['**']": "plan.yaml:2: no operator of the model computes in float16",
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes(said: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(network(), f"ranks: 1\nprecision: {{compute: float16, {said}}}", tmp_path / "build")
    assert str(caught.value).startswith(MISTAKES[said])


def test_a_model_of_integers(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]>\nmain (int64[4, 6] x) => (int64[4, 6] y) { y = Add(x, x) }'
    with pytest.raises(CompileError, match="no operator of the model computes in float16"):
        compiled(onnx.parser.parse_model(text), "ranks: 1\nprecision: {compute: float16}", tmp_path / "build")


TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: adam, lr: 0.01MORE}}\n"
HALF = "precision: {compute: float16, loss_scale: 1024}\n"
TRAINED = """<ir_version: 10, opset_import: ["" : 21]>
m (KIND[batch, 6] x) => (KIND[batch, 4] y)
{ [one] a = MatMul(x, w)
  [plus] b = Add(a, s)
  [turn] c = Gelu(b)
  [two] y = MatMul(c, v) }"""


def trainable(kind: str = "float") -> Source:
    proto, random = onnx.parser.parse_model(TRAINED.replace("KIND", kind)), np.random.default_rng(4)
    for name, shape in {"w": (6, 8), "s": (8,), "v": (8, 4)}.items():
        array = (random.standard_normal(shape) / 2).astype(np.float16)
        proto.graph.initializer.append(
            numpy_helper.from_array(array.astype(kind if kind != "float" else np.float32), name)
        )
    return Source(from_proto(proto, Path("model.onnx")))


def batches(kind: type = np.float32) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(6)
    drawn = [(random.standard_normal((8, 6)), random.standard_normal((8, 4))) for _ in range(3)]
    return [{"x": x.astype(np.float16).astype(kind), "t": t.astype(np.float32)} for x, t in drawn]


CUT = {
    "cut": ("ranks: 2\nmesh: {tp: 2}\nsharding: {one: colwise, two: rowwise}\n", "", ""),
    "piped": (
        "ranks: 2\nplacement: {one: 0, two: 1}\nsymbols: {batch: {divisor: 4}}\npipeline: {microbatches: 4}\n",
        "",
        "",
    ),
    "rounded": (
        "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\n",
        ", shard: true",
        ", messages: bfloat16",
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_training_is_the_same_wherever_it_is_cut(name: str, tmp_path: Path) -> None:
    plan, more, messages = CUT[name]
    text = plan + HALF.replace("}", f"{messages}}}") + TRAIN.replace("MORE", more)
    whole = run_training(trainable(), "ranks: 1\n" + HALF + TRAIN.replace("MORE", ""), tmp_path / "whole", batches())
    program = same_training(trainable, text, tmp_path, batches(), rtol=1e-3, atol=5e-2, whole=whole)
    reduced = {
        event.value.dtype.name
        for event in program.events
        if event.op_type in ("AllReduce", "ReduceScatter") and event.value.dtype
    }
    assert ("BFLOAT16" in reduced) == (name == "rounded")
    for part in program.parts:
        casts = [
            step
            for step in part.steps
            if isinstance(step, Compute) and step.is_op("Cast") and str(step.inputs[0]) == "w"
        ]
        assert len(casts) <= 1, "a weight is cast once a step, whatever the number of microbatches"
    assert all(one.version.value.dtype == ir.DataType.FLOAT for part in program.parts for one in part.state)


NORMALIZED = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 4] y)
{ [one] a = MatMul(x, w)
  [norm] b, mean, deviation = BatchNormalization<training_mode: int = 1>(a, scale, bias, old_mean, old_var)
  [two] y = MatMul(b, v) }"""


def test_statistics_of_a_cut_batch_are_float32(tmp_path: Path) -> None:
    """The squares of 16-bit numbers, whose means ranks add up, overflow 16 bits from 256 on."""

    def normalized() -> Source:
        proto, random = onnx.parser.parse_model(NORMALIZED), np.random.default_rng(4)
        del proto.graph.output[1:]
        for name, shape in {"w": (6, 8), "v": (8, 4)}.items():
            proto.graph.initializer.append(
                numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name)
            )
        for name, number in {"scale": 1, "bias": 0, "old_mean": 0, "old_var": 1}.items():
            proto.graph.initializer.append(numpy_helper.from_array(np.full(8, number, np.float32), name))
        return Source(from_proto(proto, Path("model.onnx")))

    steps = [{**batch, "x": batch["x"] * 300} for batch in batches()]
    plan = CUT["rounded"][0] + HALF + TRAIN.replace("MORE", "")
    program = same_training(normalized, plan, tmp_path, steps, rtol=1e-3, atol=5e-2)
    assert {made.split()[0] for name, made in types(program).items() if "norm.squares" in name} == {"f32"}


@pytest.mark.parametrize("precision", ["", HALF])
def test_weights_of_16_bits_are_trained_in_float32(precision: str, tmp_path: Path) -> None:
    plan = "ranks: 1\n" + TRAIN.replace("MORE", "")
    want = run_training(trainable(), plan, tmp_path / "single", batches())
    have = run_training(trainable("float16"), plan + precision, tmp_path / "half", batches(np.float16))
    assert check_artifact(tmp_path / "half") == []
    for one, other in zip(have.outputs, want.outputs, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=0, atol=1e-2)
    for name, value in want.after.items():
        assert have.after[name].dtype == np.float32
        np.testing.assert_allclose(have.after[name], value, rtol=0, atol=5e-3, err_msg=name)


def test_rounding_is_measured_of_values_of_16_bits() -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]>\nmain (float16[4, 6] x) => (float16[4, 6] y, int64[2] z) <float16[4, 6] h>\n'
    proto = onnx.parser.parse_model(text + "{ h = Sigmoid(x) z = Shape(h) y = Tanh(h) }")
    for name in (proto.graph.node[1].output, proto.graph.output[1]):
        if isinstance(name, onnx.ValueInfoProto):
            name.name = "h.shape"
        else:
            name[0] = "h.shape"
    proto.graph.node[0].name = "h"
    proto = onnx.shape_inference.infer_shapes(proto)
    assert perturb(proto, 1) == 2
    made = whole_outputs(proto, {"x": np.ones((4, 6), np.float16)})
    assert not np.array_equal(made["y"], np.tanh(1 / (1 + np.exp(-np.ones((4, 6), np.float16)))))
    assert made["h.shape"].tolist() == [4, 6]
