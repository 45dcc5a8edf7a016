"""What compiles runs: names that clash, values that are needed in several ways on one rank, strings, ops that only onnxruntime has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import small_training
from equivalence import compiled, model, same_as_whole
from onnx import numpy_helper
from partc.compiler.errors import CompileError
from partc.compiler.frontend.source import Source
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Comm, Compute
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.sharding.values.budget import check_budget
from partc.runtime.checker.check import check_artifact
from small_training import NORMALIZED
from training_equivalence import from_text, trained

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
HEAD = '<ir_version: 10, opset_import: ["" : 21]>'


def test_an_input_that_is_an_output_arrives_whole() -> None:
    proto = model(f"{HEAD} m (float[4, 6] x) => (float[4, 6] y, float[4, 6] x) {{ [relu] y = Relu (x) }}")
    for more in ("", "outputs: 1", "outputs: producer", "outputs: cut", "outputs: [0, 1]"):
        plan = f"ranks: 2\ndataset: data_parallel\n{more}\n"
        same_as_whole(proto, plan, {"x": X}, rtol=0, atol=0)


def test_an_output_of_overlapping_groups_has_its_own_name() -> None:
    proto = model(
        f"""{HEAD} m (float[4, 6] x) => (float[4, 6] y, float[4, 6] s) {{
            [a] s = Neg (x)
            [b] y = Relu (s)
        }}"""
    )
    same_as_whole(proto, "ranks: 4\nplacement: {a: [2, 3], b: [0, 2]}\n", {"x": X}, rtol=0, atol=0)


def test_a_weight_that_is_made_whole_and_cut_on_one_rank() -> None:
    """Two nodes of one rank stand for one of the model: they have names of their own."""
    proto = model(
        f"""{HEAD} m (float[4, 6] x) => (float[4, 6] y, float[6] t) <float[6] w = {{1, 2, 3, 4, 5, 6}}> {{
            [th] t = Tanh (w)
            [add] y = Add (x, t)
        }}"""
    )
    program = same_as_whole(proto, "ranks: 2\nsharding: {add: {in: [[1, 2], null]}}\n", {"x": X}, rtol=0, atol=1e-6)
    made = [step for step in program.parts[0].steps if isinstance(step, Compute) and step.node.op_type == "Tanh"]
    assert len(made) == 2


def test_shape_arithmetic_in_overlapping_groups() -> None:
    proto = model(
        f"""{HEAD} m (float[B, S] x) => (float[B, S] y) {{
            [n] n = Shape <start = 1, end = 2> (x)
            [ca] ca = Cast <to = 1> (n)
            [a] a = Mul (x, ca)
            [cb] cb = Cast <to = 1> (n)
            [b] y = Mul (a, cb)
        }}"""
    )
    same_as_whole(proto, "ranks: 3\nplacement: {a: [0, 1], b: [1, 2]}\n", {"x": X}, rtol=0, atol=1e-5)


NAMES = f"""{HEAD} m (float[B, 6] x) => (float[B, 6] y) <float[6, 6] w, float[6] b> {{
    [first] h = Relu (x)
    [one] i = MatMul (h, w)
    [two] j = MatMul (i, w)
    [three] k = Add (j, b)
    [four] l = Softmax <axis = -1> (k)
    [top] t = ArgMax <axis = 1, keepdims = 0> (k)
    [table] e = Gather (w, t)
    [last] y = Sum (l, h, e)
}}"""
NAMES_PLAN = """
ranks: 3
symbols: {B: {divisor: 6}}
placement: {first: 2, one: [0, 1], two: [0, 1], three: [1, 0, 2], four: [1, 2], top: [0, 1], table: [0, 1], last: [2, 0]}
sharding:
  one: {in: [[1, 1], [1, 2]]}
  two: {in: [[1, 2], [2, 1]]}
  three: {in: [[1, 3], [3]]}
  four: {in: [[2, 1]]}
  table: {in: [[2, 1], null]}
  last: {in: [[2, 1], [2, 1], [2, 1]]}
"""


def test_a_model_may_have_the_names_that_partc_derives() -> None:
    """The model once more, its values called as partc has called what it added."""
    steps = [{"x": np.random.default_rng(2).standard_normal((b, 6)).astype(np.float32)} for b in (6, 12)]
    proto = onnx.parser.parse_model(NAMES)
    for port in proto.graph.value_info:
        shape = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        array = np.linspace(-0.5, 0.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        proto.graph.initializer.append(numpy_helper.from_array(array, port.name))
    del proto.graph.value_info[:]
    program = same_as_whole(proto, NAMES_PLAN, *steps, rtol=0, atol=1e-5)
    derived = sorted(names_of(program) - {out for node in proto.graph.node for out in node.output} - {"x", "w", "b"})
    assert len(derived) > 20
    for begin in range(0, len(derived), 8):
        names = dict(zip("hijklwte", derived[begin : begin + 8], strict=False))
        same_as_whole(with_names(proto, names), NAMES_PLAN, *steps, rtol=0, atol=1e-5)


def names_of(program: Complete) -> set[str]:
    """All that ranks' programs make and hold."""
    return {str(one) for part in program.parts for step in part.steps for one in (*step.reads, *step.makes)}


def with_names(proto: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    """The model with other names for some of its values."""
    renamed = onnx.ModelProto()
    renamed.CopyFrom(proto)
    for node in renamed.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in renamed.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    return renamed


CHAIN = """<ir_version: 10, opset_import: ["" : 21]> m (float[B, 6] x) => (float[B, 6] y) {
    [s] shape = Shape (x)
    [a] h = MatMul (x, w)
    [b] i = Add (h, b)
    [c] j = Mul (i, g)
    [d] k = Reshape (j, shape)
    [e] y = Softmax <axis = -1> (k)
}"""
ALIKE = {
    "shape": "h.shape",
    "i": "h.grad",
    "j": "lr.momentum",
    "k": "lr.squares",
    "w": "lr",
    "b": "lr.next",
    "g": "lr.grad",
}
TRAIN = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: momentum, lr: 0.1}, clip: {norm: 1.5}}\n"


def source_alike(shapes: dict[str, tuple[int, ...]]) -> Source:
    """The model of CHAIN under the names of ALIKE."""
    source = from_text(CHAIN, shapes)
    graph = source.model.graph
    for value in [*graph.initializers.values(), *(out for node in graph for out in node.outputs)]:
        value.name = ALIKE.get(str(value.name), value.name)
    return source


@pytest.mark.parametrize(
    "plan", ["dataset: data_parallel", "placement: {a: 0, b: 0, c: 0, d: 1}", "sharding: {a: colwise}"]
)
def test_training_beside_names_that_partc_derives(plan: str, tmp_path: Path) -> None:
    """Parameters and values called like cotangents, slots, shapes and scalars learn as if they were called otherwise."""
    random = np.random.default_rng(2)
    steps = [{name: random.standard_normal((4, 6)).astype(np.float32) for name in "xt"} for _ in range(2)]
    shapes = {"w": (6, 6), "b": (6,), "g": (6,)}
    want, after, _ = trained(from_text(CHAIN, shapes), f"ranks: 1\n{TRAIN}", tmp_path / "whole", steps)
    out = tmp_path / "build"
    have, tensors, _ = trained(
        source_alike(shapes), f"ranks: 2\nsymbols: {{B: {{divisor: 2}}}}\n{plan}\n{TRAIN}", out, steps
    )
    assert check_artifact(out) == []
    for one, other in zip(have, want, strict=True):
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-5)
    lamb = f"ranks: 2\n{plan}\nsymbols: {{B: {{divisor: 2}}}}\n{TRAIN.replace('momentum', 'lamb')}"
    compile_source(source_alike(shapes), parse_plan(lamb, "plan.yaml"), tmp_path / "lamb")
    assert check_artifact(tmp_path / "lamb") == []
    for name in shapes:
        np.testing.assert_allclose(tensors[ALIKE[name]], after[name], rtol=1e-5, atol=1e-6)


def test_strings_are_not_cut() -> None:
    proto = model(f"{HEAD} m (string[4] x) => (string[4] y) {{ [id] y = Identity (x) }}")
    same_as_whole(proto, "ranks: 2\ndataset: data_parallel\n", {"x": np.array(list("abcd"), object)}, rtol=0, atol=0)
    with pytest.raises(CompileError, match="it is of strings"):
        same_as_whole(proto, "ranks: 2\ndataset: {x: [2]}\n", rtol=0, atol=0)
    with pytest.raises(CompileError, match="input 0, dim 0 is cut into 2, but stays whole"):
        same_as_whole(proto, "ranks: 2\nsharding: {id: {in: [[2]]}}\n", rtol=0, atol=0)


def test_a_constant_that_no_group_reads_is_not_cut() -> None:
    proto = model(
        f"{HEAD} m (float[4, 6] x) => (float[4, 6] y, float[2] t) <float[2] w = {{1, 2}}> {{ [c] t = Tanh (w) [r] y = Relu (x) }}"
    )
    with pytest.raises(CompileError, match="runs on rank 0 alone"):
        same_as_whole(proto, "ranks: 2\nsharding: {c: {out: [[2]]}}\n", rtol=0, atol=0)


def test_a_shard_of_a_value_of_unknown_shape_states_its_own_dims() -> None:
    """How many rows NonZero finds is known when it runs; the columns are cut."""
    proto = model(
        f"""{HEAD} m (float[2, 3, 4] x, int64[5, 3] i) => (float[K] y, int64[5, 3] z) {{
            [nz] a = NonZero (x)
            [tr] t = Transpose <perm = [1, 0]> (a)
            [nd] y = GatherND (x, t)
            [ge] z = GatherElements <axis = 1> (t, i)
        }}"""
    )
    inputs = {"x": X.reshape(2, 3, 4), "i": np.array([[0, 1, 2]] * 5)}
    same_as_whole(proto, "ranks: 3\nsharding: {ge: {in: [[1, 3], null]}}\n", inputs, rtol=0, atol=0)


def test_a_value_of_unknown_shape_is_gathered_before_it_leaves_its_group() -> None:
    proto = model(
        f"""{HEAD} m (float[4, 6] x) => (int64[K, 2] y, int64[2, K] z) {{
            [nz] a = NonZero (x)
            [tr] y = Transpose <perm = [1, 0]> (a)
            [id] z = Neg (a)
        }}"""
    )
    plan = "ranks: 4\nplacement: {tr: [0, 1], id: [3, 2]}\nsharding: {tr: {in: [[2, 1]]}, id: {in: [[2, 1]]}}\n"
    for more in ("outputs: 3", "outputs: cut", "outputs: producer"):
        same_as_whole(proto, f"{plan}{more}\n", {"x": X}, rtol=0, atol=0)


@pytest.mark.parametrize("more", ["outputs: 2", "outputs: [2, 0]"])
def test_a_value_of_unknown_shape_is_gathered_on_more_ranks_than_read_it(more: str) -> None:
    """All ranks take part in the AllGather, and the file of each says what it makes."""
    proto = model(
        f"""{HEAD} m (float[4, 6] x) => (int64[2, K] z) {{
            [nz] a = NonZero (x)
            [ng] z = Neg (a)
        }}"""
    )
    plan = f"ranks: 4\n{more}\nsharding: {{nz: {{out: [[2, 1]]}}}}\n"
    program = same_as_whole(proto, plan, {"x": X}, rtol=0, atol=0)
    for part in program.parts:
        made = [one for step in part.steps if isinstance(step, Comm) for one in step.makes]
        assert all(one.of is not None for one in made)


def test_what_a_rank_makes_alone_has_another_name_than_what_it_gathers() -> None:
    """Groups that overlap make `h` of shape arithmetic each; as an output it is gathered on ranks of which one has it already."""
    proto = model(
        f"""{HEAD} m (float[B, 3] x) => (float[B, 3] a, float[B, 3] h, float[B, 3] c) <float[1, 3] w = {{1, 2, 3}}> {{
            [n] s = Shape (x)
            [e] h = Expand (w, s)
            [one] a = Add (h, x)
            [all] c = Mul (h, x)
        }}"""
    )
    plan = (
        "ranks: 3\nsymbols: {B: {divisor: 3}}\ndataset: data_parallel\noutputs: producer\nplacement: {n: 2, one: 2}\n"
    )
    same_as_whole(proto, plan, {"x": X[:3, :3]}, {"x": X.reshape(6, 4)[:, :3]}, rtol=0, atol=0)


def test_check_knows_the_ops_that_only_onnxruntime_has(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        f"""{HEAD} m (float[4, 6] x) => (float[4, 6] y) <float[6] w = {{1, 2, 3, 4, 5, 6}}> {{
            y = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001> (x, w)
        }}"""
    )
    compiled(proto, "ranks: 1\n", tmp_path / "build")
    assert check_artifact(tmp_path / "build") == []


def test_statistics_are_replaced_on_a_group_in_another_order(tmp_path: Path) -> None:
    text = NORMALIZED.replace("=> (float[batch, 5] y)", "=> (float[batch, 6] z)").replace(
        "running_var>", "running_var, float[5, 6] w>"
    )
    text = text[: text.rindex("}")] + "    [head] z = MatMul (y, w)\n}"
    train = TRAIN.replace("prediction: y", "prediction: z").replace("momentum", "sgd")
    for place in ("[1, 0]", "0"):
        cut = "sharding: {head: colwise}\n" if "," in place else ""
        plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\nplacement: {{head: {place}}}\n{cut}{train}"
        small_training.compiled(tmp_path / "build", text, "", plan)
        assert check_artifact(tmp_path / "build") == []


def test_an_op_inside_a_styled_module_that_needs_a_dim_whole_is_told() -> None:
    proto = model(
        f"""{HEAD} m (float[4, 6] x, float[6, 6] w) => (float[4, 6] y) {{
            ["block.up"] h = MatMul (x, w)
            ["block.soft"] s = Softmax <axis = -1> (h)
            ["block.turn"] y = Neg (s)
        }}"""
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.tile(X[:1] / 3, (6, 1)), "w"))
    del proto.graph.input[1]
    program = same_as_whole(proto, "ranks: 2\nsharding: {block: colwise}\n", {"x": X}, rtol=0, atol=1e-5)
    (told,) = program.warnings
    assert (
        told == "plan.yaml:2: 'h' is cut [1, 2], but Softmax (block.soft) needs dim 1 replicated: it is gathered there"
    )
    with pytest.raises(CompileError, match=r"read by block\.soft"):
        check_budget(replace(program, strict=True))
