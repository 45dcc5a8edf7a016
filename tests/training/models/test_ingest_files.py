"""Training of `.onnx` files: which tensors are learned, what the plan says against it, and files of all kinds that exporters write."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from partc.cli.commands.compile import command
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto, load_onnx
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import run_passes, start, step_program
from partc.compiler.plan.read import parse_plan
from partc.compiler.training.trainable import trainable_names
from partc.compiler.training_passes import add_training
from training_equivalence import run, same_tensors

TRAIN = """train:
  loss: {type: softmax_cross_entropy, logits: y, labels: t}
  optimizer: {type: momentum, lr: 0.1, momentum: 0.9}
"""
ONE, TWO = "ranks: 1\n", "ranks: 2\nsymbols: {batch: {divisor: 2}}\ndataset: data_parallel\n"
TENSORS: dict[str, tuple[tuple[int, ...], str, bool]] = {
    "kernel": ((4, 1, 3, 3), "Conv<pads = [1, 1, 1, 1]>({last}, kernel)", True),
    "gain": ((1,), "PRelu({last}, gain)", True),
    "temperature": ((1,), "Div({last}, temperature)", False),
    "half": ((), "Mul({last}, half)", False),
    "mean": ((1, 4, 1, 1), "Sub({last}, mean)", True),
    "sizes": ((4,), 'Resize<mode = "nearest">({last}, , sizes)', False),
    "positions": ((1, 1, 4, 4), "Add({last}, positions)", True),
    "mask": ((1, 1, 4, 4), "Add({last}, mask)", False),
    "endless": ((1, 1, 4, 4), "Max({last}, endless)", False),
    "triangle": ((4, 4), "Mul({last}, triangle)", False),
    "limits": ((4, 4), "Less({last}, limits)", False),
    "weight": ((4, 1), "MatMul(triangle_made, weight)", True),
    "bias": ((1,), "Add({last}, bias)", True),
    "ones": ((1, 2), "MatMul({last}, ones)", True),
}
NUMBERS = {
    "sizes": np.ones(4),
    "mask": np.triu(np.full((1, 1, 4, 4), -1e9), 1),
    "endless": np.full((1, 1, 4, 4), -np.inf),
    "triangle": np.tril(np.ones((4, 4))),
    "ones": np.ones((1, 2)),
}


def by_hand(kind: type = np.float32) -> onnx.ModelProto:
    """A chain that reads each of the tensors, and a constant that is a node."""
    lines, last, rng = [], "x", np.random.default_rng(2)
    for name, (_, text, _) in TENSORS.items():
        lines.append(f"{name}_made = {text.format(last=last)}")
        last = f"{name}_made"
    text = """<ir_version: 8, opset_import: ["" : 18]>
    main (float[batch, 1, 4, 4] x) => (float[batch, c, 4, 2] y) {
      LINES
      scale = Constant<value_floats = [2.0, 3.0]>()
      scaled = Mul(ones_made, scale)
      y = Gather<axis = 2>(scaled, table)
    }""".replace("LINES", "\n".join(lines))
    model = onnx.parser.parse_model(text)
    for name, (shape, _, _) in TENSORS.items():
        array = np.asarray(NUMBERS.get(name, rng.normal(size=shape)), kind)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3, 0, 2, 1]), "table"))
    return model


def test_what_is_learned_of_a_file_follows_a_law() -> None:
    model = from_proto(by_hand(), Path("model.onnx"))
    assert trainable_names(model) == [name for name, (_, _, learned) in TENSORS.items() if learned]


def test_what_torch_marks_as_a_buffer_is_not_learned() -> None:
    """Rotary frequencies look like a table that is learned; the exporter says what is."""
    proto = by_hand()
    for name, kind in (("mean", "BUFFER"), ("weight", "BUFFER"), ("kernel", "PARAMETER")):
        info = proto.graph.value_info.add(name=name, type=onnx.helper.make_tensor_type_proto(1, TENSORS[name][0]))
        info.metadata_props.add(key="pkg.torch.export.graph_signature.InputSpec.kind", value=kind)
    found = trainable_names(from_proto(proto, Path("model.onnx")))
    assert found == [name for name, (_, _, learned) in TENSORS.items() if learned and name not in ("mean", "weight")]


SMALL = """<ir_version: 8, opset_import: ["" : 18]>
main (float[batch, 4] x) => (float[batch, 3] y)
<float[4, 4] shared = {1, 0, -1, 2, 0, 1, 2, 1, -2, 0, 1, 0, 1, 3, 0, 1}, float[4, 4] mask = {MASK},
 float[4, 3] head = {1, 0, -1, 2, 0, 1, 2, 1, -2, 0, 1, 0}, float[3] bias = {0, 1, -1}> {
    a = MatMul(x, shared)
    b = Tanh(a)
    c = MatMul(b, shared)
    d = Exp(mask)
    e = MatMul(c, d)
    f = MatMul(e, head)
    y = Add(f, bias)
}""".replace("MASK", ", ".join("-2e4" if k > i else "0" for i in range(4) for k in range(4)))


def small(kind: type = np.float32, text: str = SMALL) -> onnx.ModelProto:
    """A weight that two nodes read, and a mask."""
    model = onnx.parser.parse_model(text)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(kind), tensor.name))
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    return model


def given(kind: type = np.float32) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [{"x": rng.normal(size=(6, 4)).astype(kind), "t": rng.integers(0, 3, 6)} for _ in range(3)]


def source_of(model: onnx.ModelProto) -> Source:
    return Source(from_proto(model, Path("model.onnx")))


def parameters(text: str) -> dict[str, bool]:
    """By parameter whether it is frozen, as the plan says under `parameters`."""
    plan = parse_plan(ONE + TRAIN + f"  parameters: {text}\n", "plan.yaml")
    program = run_passes(start(source_of(small()), plan, "model.onnx"), add_training)
    assert program.training is not None
    return {str(value.name): how.frozen for value, how in program.training.parameters.items()}


def test_the_plan_has_the_last_word() -> None:
    assert parameters("{}") == {"shared": False, "head": False, "bias": False}
    assert parameters("{mask: {frozen: true}, bias: {frozen: true}}") == {"shared": False, "head": False, "bias": True}
    freed = '{"**": {frozen: true}, mask: {frozen: false}}'
    assert parameters(freed) == {"shared": True, "head": True, "bias": True, "mask": False}
    with pytest.raises(CompileError) as caught:
        parameters('{"ma*": {frozen: false}, heads: {lr: 0.1}}')
    assert str(caught.value).splitlines() == [
        "plan.yaml:5: 'ma*' matches no parameter of the model",
        "  it matches 'mask', a tensor of floats that is not trainable",
        '  help: "mask": {frozen: false} makes it trainable',
        "plan.yaml:5: 'heads' matches no parameter of the model",
        "  help: the nearest are 'head'",
    ]


def test_the_command_tells_what_is_learned(tmp_path: Path) -> None:
    onnx.save(small(), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text(ONE + TRAIN + "  parameters: {bias: {frozen: true}}\n")
    paths = [str(tmp_path / name) for name in ("model.onnx", "plan.yaml", "build")]
    said = CliRunner().invoke(command, [paths[0], "--plan", paths[1], "-o", paths[2]]).output
    line = "trains 2 parameters, 28 elements; frozen: 1 parameter, 3 elements; not trained: mask [4, 4]"
    assert line in said.splitlines()


PARTS = """r = Mul(p, q)
    y = Concat<axis = 1>(r, p)"""
SEQUENCE = """s = SplitToSequence<axis = 1>(f, SIZE)
    p = SequenceAt(s, zero)
    q = SequenceAt(s, last)
    """


def test_splits_that_are_written_as_sequences_have_gradients(tmp_path: Path) -> None:
    tensors = "int64[2] sizes = {2, 1}, int64 two = {2}, int64 zero = {0}, int64 last = {-1}, float[batch, 3] f"
    text = SMALL.replace("float[3] bias = {0, 1, -1}", tensors).replace("float[batch, 3] y)", "float[batch, c] y)")
    tails = {name: SEQUENCE.replace("SIZE", name) for name in ("sizes", "two")}
    tails["split"] = "p, q = Split<axis = 1>(f, sizes)\n    "
    plan, made = ONE + TRAIN.replace("0.1", "0.01"), {}
    for name, tail in tails.items():
        model = small(text=text.replace("y = Add(f, bias)", tail + PARTS))
        made[name] = run(source_of(model), plan, tmp_path / name, given())
    for name in ("sizes", "two"):
        same_tensors(made[name].after, made["split"].after, made["split"].before, 1e-6)


def test_what_is_not_learned_stays_and_a_weight_of_two_nodes_is_one(tmp_path: Path) -> None:
    one = run(source_of(small()), ONE + TRAIN, tmp_path / "one", given())
    assert {name for name in one.after if not name.endswith(".momentum")} == {"shared", "head", "bias"}
    two = run(source_of(small()), TWO + TRAIN, tmp_path / "two", given())
    same_tensors(two.after, one.after, one.before, 1e-4)
    split = small(text=SMALL.replace("MatMul(b, shared)", "MatMul(b, again)"))
    again = onnx.TensorProto()
    again.CopyFrom(split.graph.initializer[0])
    again.name = "again"
    split.graph.initializer.append(again)
    apart = run(source_of(split), ONE + TRAIN, tmp_path / "apart", given()[:1])
    first = run(source_of(small()), ONE + TRAIN, tmp_path / "first", given()[:1])
    both = apart.after["shared.momentum"] + apart.after["again.momentum"]
    np.testing.assert_allclose(first.after["shared.momentum"], both, rtol=1e-5, atol=1e-6)


def test_weights_that_are_listed_as_inputs_are_learned(tmp_path: Path) -> None:
    old = small()
    for tensor in old.graph.initializer:
        old.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    have, want = (run(source_of(one), ONE + TRAIN, tmp_path / str(k), given()) for k, one in enumerate((old, small())))
    same_tensors(have.after, want.after, want.before, 1e-6)


@pytest.mark.parametrize(
    "more", ["", "  clip: {norm: 0.1}\n", "  optimizer: {type: lamb, lr: 0.01}\n  on_nonfinite: skip\n"]
)
def test_weights_in_float64_train_and_those_in_float16_on_float32(more: str, tmp_path: Path) -> None:
    plan = ONE + (re.sub("(?m)^  optimizer.*\n", "", TRAIN) if "optimizer" in more else TRAIN) + more
    have = run(source_of(small(np.float64)), plan, tmp_path / "double", given(np.float64))
    want = run(source_of(small()), plan, tmp_path / "single", given())
    assert {array.dtype for name, array in have.after.items() if "." not in name} == {np.dtype(np.float64)}
    same_tensors(have.after, want.after, want.before, 1e-4)
    half = run(source_of(small(np.float16)), plan, tmp_path / "half", given(np.float16))
    assert {array.dtype for name, array in half.after.items() if "." not in name} == {np.dtype(np.float32)}
    same_tensors(half.after, want.after, want.before, 2e-2)


def convolutions(opset: int) -> onnx.ModelProto:
    """Ops that were written otherwise before opset 13."""
    made, node, rng = onnx.helper, onnx.helper.make_node, np.random.default_rng(3)
    arrays = {"c": rng.normal(size=(2, 1, 3, 3)), "g": np.ones(2), "b": np.zeros(2), "m": np.zeros(2), "v": np.ones(2)}
    arrays |= {"w1": rng.normal(size=(8, 6)), "w2": rng.normal(size=(6, 3)), "bias": np.zeros(3), "low": np.array(-0.5)}
    weights = [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    axes: list[dict[str, Any]] = [{"axes": [1]}, {"axes": [1]}]
    if opset >= 13:
        weights.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
        axes = [{}, {}]
    last = ["one"] if opset >= 13 else []
    nodes = [
        node("Conv", ["x", "c"], ["h0"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["h0", "g", "b", "m", "v"], ["h1"]),
        node("MaxPool", ["h1"], ["h2"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Clip", ["h2", "low"], ["h3"]),
        node("Flatten", ["h3"], ["h4"]),
        node("MatMul", ["h4", "w1"], ["h5"]),
        node("Unsqueeze", ["h5", *last], ["h6"], **axes[0]),
        node("ReduceSum", ["h6", *last], ["h7"], keepdims=0, **axes[1]),
        node("Softmax", ["h7"], ["h8"], axis=1),
        node("Gemm", ["h8", "w2", "bias"], ["y"]),
    ]
    ports = [made.make_tensor_value_info(n, 1, dims) for n, dims in (("x", ["batch", 1, 4, 4]), ("y", ["batch", 3]))]
    graph = made.make_graph(nodes, "old", ports[:1], ports[1:], weights)
    return made.make_model(graph, opset_imports=[made.make_opsetid("", opset)], ir_version=6 if opset < 13 else 10)


def test_a_file_of_opset_11_trains(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    steps = [{"x": rng.normal(size=(4, 1, 4, 4)).astype(np.float32), "t": rng.integers(0, 3, 4)} for _ in range(3)]
    old, new = (run(source_of(convolutions(k)), ONE + TRAIN, tmp_path / str(k), steps) for k in (11, 21))
    assert {"c", "g", "b", "w1", "w2", "bias", "m", "v"} <= set(old.after)
    same_tensors(old.after, new.after, new.before, 1e-5)


def test_weights_beside_a_file_are_not_read_whole(tmp_path: Path) -> None:
    model, size = small(), 1 << 26
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Gather", ["shared", "ids"], ["a"]))
    model.graph.node[2].CopyFrom(onnx.helper.make_node("Identity", ["b"], ["c"]))
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch"]))
    table = onnx.TensorProto(name="shared", data_type=1, dims=[size // 16, 4], data_location=onnx.TensorProto.EXTERNAL)
    table.external_data.append(onnx.StringStringEntryProto(key="location", value="table.bin"))
    model.graph.initializer[0].CopyFrom(table)
    with (tmp_path / "table.bin").open("wb") as file:
        file.truncate(size)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    tracemalloc.start()
    try:
        source = Source(load_onnx(tmp_path / "model.onnx"))
        program = step_program(source, parse_plan(TWO + TRAIN, "plan.yaml"), "model.onnx")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert program.training is not None
    assert "shared" in {value.name for value in program.training.parameters}
    assert peak < size // 8
