"""Sizes that only a run tells: what is cut all the same, where the knowledge was lost, and what partc says of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, model, same_as_whole
from onnx import numpy_helper
from partc.cli.output.stats import moved
from partc.compiler.errors import CompileError


def with_weights(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\nmain {text}')
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        proto.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    return proto


PICKED = """(float[n, 6] x, bool[n] m) => (float[p, 6] y) {
    [pick] t = Compress <axis = 0> (x, m)
    [up] h = MatMul(t, up.w)
    [act] a = Relu(h)
    [down] y = MatMul(a, down.w)
}"""


def picked() -> onnx.ModelProto:
    return with_weights(PICKED.replace("up.w", "w").replace("down.w", "v"), w=(6, 8), v=(8, 6))


def steps() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [
        {"x": random.standard_normal((n, 6)).astype(np.float32), "m": np.arange(n) < kept}
        for n, kept in ((5, 3), (4, 4), (3, 1), (4, 0))
    ]


def test_other_dims_are_cut_beside_an_unknown_one() -> None:
    program = same_as_whole(
        picked(), "ranks: 2\nsharding: {up: colwise, down: rowwise}\n", *steps(), rtol=1e-5, atol=1e-5
    )
    assert [event.op_type for event in program.events] == ["AllReduce"]
    assert program.warnings == ()


def said(proto: onnx.ModelProto, plan: str, out: Path) -> str:
    with pytest.raises(CompileError) as error:
        compiled(proto, plan, out / "build")
    return str(error.value)


def test_a_refused_cut_names_the_node_that_lost_the_size(tmp_path: Path) -> None:
    text = said(picked(), "ranks: 2\nsharding: {act: {in: [[2, 1]]}}\n", tmp_path)
    assert "Relu (act): cannot cut 'h' dim 0 (unknown) into 2" in text
    assert "Compress (pick) decides its size by the numbers in its operand" in text
    assert "help: do not shard it, or shard another dim" in text


def test_sizes_lost_by_a_broadcast_and_by_an_input(tmp_path: Path) -> None:
    two = with_weights("(float[p, 4] x, float[q, 4] w) => (float[k, 4] y) { [add] h = Add(x, w) [act] y = Relu(h) }")
    text = said(two, "ranks: 2\nsharding: {act: {in: [[2, 1]]}}\n", tmp_path)
    assert "Add (add) broadcasts p and q, and either may be 1 or 0" in text
    assert "give them one name under `inputs` if they are equal; else declare `symbols: {p: {min: 2}}`" in text
    shaped = with_weights("(float[8, 4] x, int64[2] s) => (float[p, q] y) { [re] h = Reshape(x, s) [act] y = Relu(h) }")
    text = said(shaped, "ranks: 2\nsharding: {act: {in: [[2, 1]]}}\n", tmp_path)
    assert "Reshape (re) takes it from 's', which is known only at run time" in text


def test_a_collective_for_want_of_a_size_is_told() -> None:
    proto = with_weights(
        """(float[4, 8] x, int64[2] s) => (float[p, q] y) {
            [up] h = MatMul(x, w)
            [re] g = Reshape(h, s)
            [act] y = Relu(g)
        }""",
        w=(8, 6),
    )
    step = {"x": np.ones((4, 8), np.float32), "s": np.array([8, 3])}
    program = same_as_whole(proto, "ranks: 2\nsharding: {up: colwise}\n", step, rtol=1e-5, atol=1e-5)
    assert [event.op_type for event in program.events] == ["AllGather"]
    (warning,) = program.warnings
    assert "'h' is replicated along dim 1 for re, since dim 0 of 'g' is not known" in warning
    assert "Reshape (re) takes it from 's', which is known only at run time" in warning


def test_a_shard_loses_the_axes_that_the_whole_loses() -> None:
    proto = with_weights(
        "(float[2, 1, 6] x) => (float[2, 6] y) { [act] a = Relu(x) [sq] b = Squeeze(a) [add] y = Add(b, c) }", c=(6,)
    )
    step = {"x": np.random.default_rng(0).standard_normal((2, 1, 6)).astype(np.float32)}
    same_as_whole(proto, "ranks: 2\nsharding: {act: {in: [[2, 1, 1]]}}\n", step, rtol=0, atol=0)


@pytest.mark.parametrize("plan", ["placement: {dist: 0, act: 1}", "mesh: {x: 2}"])
def test_an_op_without_a_shape_rule_has_the_type_that_onnxruntime_says(plan: str) -> None:
    proto = with_weights(
        """(float[n, 6] x, float[m, 6] w) => (float[p, q] y) {
            [dist] d = com.microsoft.CDist <metric = "euclidean"> (x, w)
            [act] y = Relu(d)
        }"""
    )
    random = np.random.default_rng(0)
    step = {name: random.standard_normal((n, 6)).astype(np.float32) for name, n in (("x", 3), ("w", 4))}
    program = same_as_whole(proto, f"ranks: 2\n{plan}\n", step, rtol=1e-6, atol=1e-6)
    kinds = {value.name: (info.type, info.shape) for value, info in program.values.items()}
    assert kinds["d"] == kinds["y"] == ("tensor(float)", None)


def test_an_output_of_unknown_size_that_should_stay_cut_is_whole() -> None:
    proto = model("""<ir_version: 10, opset_import: ["" : 21]>
    main (float[4, 3] x, bool[3] e) => (float[4, k] y) { [co] y = Compress <axis = 1> (x, e) }""")
    step = {"x": np.ones((4, 3), np.float32), "e": np.array([True, False, True])}
    program = same_as_whole(proto, "ranks: 2\ndataset: {x: [2, 1]}\noutputs: cut\n", step, rtol=0, atol=0)
    (warning,) = program.warnings
    assert "output 'y' is gathered, for only a value of known shape can stay sharded: Compress (co) decides" in warning


def test_bytes_that_are_a_fraction_are_rounded_up() -> None:
    assert moved(["4*n/3"] * 2, {"n": 5}).bytes == 14
