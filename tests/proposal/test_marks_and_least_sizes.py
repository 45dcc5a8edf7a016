"""Dims of other people's files: marks of unknown sizes, and the least sizes that a model has, in proposals and compiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, same_as_whole
from onnx import TensorProto, helper, numpy_helper
from partc.compiler.analysis.shapes import shapes
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto, is_mark
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import run_passes
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.batch import least_sizes
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.propose import propose
from partc.compiler.start import start
from partc.runtime.checker.check import check_artifact

HEAD = '<ir_version: 8, opset_import: ["": 18]>\ng '


def text_model(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(HEAD + text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def source_of(model: onnx.ModelProto) -> Source:
    return Source(from_proto(model, Path("model.onnx")))


def pooled(dims: list[int | str | None]) -> onnx.ModelProto:
    """A network over pictures of any size, whose input has these dims."""
    rng = np.random.default_rng(0)
    weights = {"k": rng.standard_normal((8, 3, 3, 3)), "fc": rng.standard_normal((8, 4))}
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "fc"], ["y"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)
    if dims[0] == -1:
        given.type.tensor_type.shape.dim[0].dim_value = -1
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(value.astype("float32"), name) for name, value in weights.items()]
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(
        helper.make_graph(nodes, "g", [given], [made], tensors), opset_imports=opsets, ir_version=8
    )


@pytest.mark.parametrize("mark", ["?", "-1", "None", "unk", "__unknown__", "*", ""])
def test_a_mark_of_an_unknown_size_is_a_dim_of_its_own_at_each_place(mark: str) -> None:
    model = pooled([-1, 3, mark, mark])
    plan, _ = propose(source_of(model), "model.onnx", Degrees(dp=2))
    named = [f"  x_dim_{k}: {{}}   # dim {k} of 'x', which the model does not name" for k in (2, 3)]
    assert [line for line in plan.splitlines() if line.startswith(("  x_dim", "  x:"))] == [
        *named,
        "  x: [batch, 3, x_dim_2, x_dim_3]   # float32 [?, 3, ?, ?]",
    ]
    if mark == "?":
        feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 6, 15)).astype("float32")}
        same_as_whole(model, plan, feeds, rtol=1e-5, atol=1e-6)


def test_a_name_is_not_a_mark() -> None:
    assert not any(map(is_mark, ["batch", "unk__12", "batch size", "N", "past + 1", "none_of_them", "p2o.Dynamic.0"]))


WINDOWS = "(float[b, 3, h, w] x) => (float[b, 2, p, q] y) {"
CONV = "c = Conv<kernel_shape=[3, 5], strides=[2, 2]>(x, k)"
LEAST = {
    "windows without padding": (f"{WINDOWS} y = Conv(x, k) }}", {"h": 3, "w": 5}),
    "windows behind each other": (f"{WINDOWS} {CONV} y = MaxPool<kernel_shape=[2, 2]>(c) }}", {"h": 5, "w": 7}),
    "windows with padding": (f"{WINDOWS} y = Conv<pads=[1, 2, 1, 2]>(x, k) }}", {}),
    "sizes that become smaller": (f"{WINDOWS} {CONV} y = Resize(c, none, halves) }}", {"h": 5, "w": 7}),
    "an entry that copies": (
        """(float[n, 6] x) => (float[k, m] y) { s = Shape(x)  z = Slice(s, zero, one)  t = Div(z, three)
            all = Concat<axis=0>(t, last)  y = Reshape(x, all) }""",
        {"n": 3},
    ),
    "a product of two": (
        f"""{WINDOWS} a = AveragePool<kernel_shape=[2, 3]>(x) s = Shape(a) v = Slice(s, two, four) r = ReduceProd(v, zero)
            f = Reshape(a, flat) t = Concat<axis=0>(r, last) y = Reshape(f, t) }}""",
        {"h": 2, "w": 3},
    ),
    "a slice that may be empty": ("(float[b, t] x) => (float[b, u] y) { y = Slice(x, one, four, one) }", {}),
    "a past and its new": (
        """(float[b, past] x, float[b, new] z) => (float[b, u] y) { c = Concat<axis=1>(x, z)
            y = Slice(c, one, large, one) }""",
        {},
    ),
}


def weights_of(text: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    known = {
        "k": rng.standard_normal((2, 3, 3, 5)).astype("float32"),
        "none": np.zeros(0, "float32"),
        "halves": np.array([1, 1, 0.5, 0.5], "float32"),
        **{name: np.array([k]) for k, name in enumerate(("zero", "one", "two", "three", "four"))},
        **{"last": np.array([-1]), "large": np.array([1000]), "flat": np.array([-1])},
    }
    body = text.partition("{")[2].replace("(", " ").replace(")", " ").replace(",", " ").split()
    return {name: value for name, value in known.items() if name in body}


@pytest.mark.parametrize("case", LEAST)
def test_the_least_size_follows_from_the_model(case: str) -> None:
    text, least = LEAST[case]
    symbols, because = least_sizes(source_of(text_model(text, **weights_of(text))), "model.onnx")
    assert {name: symbol.min for name, symbol in symbols.items()} == least
    assert because.keys() == least.keys()


RECOGNIZER = """(float[b, 3, h, w] x) => (float[b, 1, v, 12] y) {
    f = Conv<kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]>(x, k)
    p = AveragePool<kernel_shape=[2, 2], strides=[2, 2]>(f)
    s = Shape(p)  v1 = Slice(s, three, four, zero)
    flat = Reshape(p, channels)  rows = Transpose<perm=[0, 2, 1]>(flat)
    u = MatMul(rows, up)  a = Relu(u)  d = MatMul(a, down)
    to = Concat<axis=0>(zero, one, v1, twelve)  y = Reshape(d, to) }"""


def recognizer() -> onnx.ModelProto:
    """A recognizer of lines of text, whose width is that of a map that pooling makes."""
    rng = np.random.default_rng(0)
    floats = {"k": (8, 3, 3, 3), "up": (8, 16), "down": (16, 12)}
    numbers = {"zero": [0], "one": [1], "three": [3], "four": [4], "twelve": [12], "channels": [0, 8, -1]}
    weights = {name: rng.standard_normal(shape).astype("float32") for name, shape in floats.items()}
    return text_model(RECOGNIZER, **weights, **{name: np.array(value) for name, value in numbers.items()})


def test_proofs_take_legal_sizes_alone(tmp_path: Path) -> None:
    plan, _ = propose(source_of(recognizer()), "model.onnx", Degrees(tp=2))
    assert "  w: {min: 3}   # smaller ones leave no window in AveragePool 'AveragePool_0'\n" in plan
    assert compiled(recognizer(), plan, tmp_path / "a").warnings == ()
    unsaid = plan.replace("  w: {min: 3}", "  w: {}")
    program = compiled(recognizer(), unsaid, tmp_path / "b")
    assert [text.partition(": ")[2] for text in program.warnings] == [
        "'w' may be 1, and the model needs at least 3: smaller ones leave no window in AveragePool 'AveragePool_0'; "
        "say `w: {min: 3}`"
    ]
    for folder in ("a", "b"):
        assert check_artifact(tmp_path / folder) == []
    assert program.symbols["w"].facts.min == 3


def test_a_largest_size_that_the_model_exceeds_is_refused() -> None:
    text, _ = LEAST["windows behind each other"]
    plan = parse_plan("ranks: 1\nsymbols: {w: {max: 6}}\n", "plan.yaml")
    with pytest.raises(
        CompileError, match="'w' is at most 6, and the model needs at least 7: smaller ones leave no window"
    ):
        run_passes(start(source_of(text_model(text, **weights_of(text))), plan, "model.onnx"), shapes)
