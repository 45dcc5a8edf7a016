"""Training and streaming have one answer to which dim of which input holds records, and do with it what the whole batch does."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence import compiled, same_as_whole
from onnx import TensorProto, helper
from partc.cli.main import invoke
from partc.compiler.analysis.shapes import shapes
from partc.compiler.errors import CompileError
from partc.compiler.frontend import load
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source, run_passes, start
from partc.compiler.plan.read import parse_plan
from partc.runtime import Trainer
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.artifact.training.data_spec import Spec
from partc.runtime.checker.check import check_artifact
from partc.runtime.data.loader import open_loader
from trainer_case import on_all
from training_equivalence import run, run_whole

Dims = Mapping[str, Sequence[int | str]]
TRAIN = "train:\n  loss: {type: softmax_cross_entropy, logits: y, labels: label}\n  optimizer: {type: sgd, lr: 0.5}\n"
OWN = "train:\n  loss: total\n  optimizer: {type: sgd, lr: 0.5}\n"
MICROBATCHES = "pipeline: {microbatches: 2}\n"


def network(inputs: Dims, *, classes: bool) -> onnx.ModelProto:
    """`classes`: y of (batch, 5), of each record the sum of its numbers times weights; else `total`, the sum of all numbers."""
    nodes, weights = [], [helper.make_tensor("last", TensorProto.INT64, [1], [1])]
    for k, (name, dims) in enumerate(inputs.items()):
        if not classes:
            nodes.append(helper.make_node("ReduceSum", [name], [f"{name}.m"], keepdims=0))
            continue
        at = dims.index("batch")
        order = [at, *(axis for axis in range(len(dims)) if axis != at)]
        shape = helper.make_tensor(f"{name}.shape", TensorProto.INT64, [2], [0, -1])
        mix = np.random.default_rng(k).normal(size=5)
        weights += [shape, helper.make_tensor(f"{name}.w", TensorProto.FLOAT, [1, 5], mix)]
        nodes += [
            helper.make_node("Transpose", [name], [f"{name}.t"], name=f"{name}_turn", perm=order),
            helper.make_node("Reshape", [f"{name}.t", f"{name}.shape"], [f"{name}.r"], name=f"{name}_flat"),
            helper.make_node("ReduceMean", [f"{name}.r", "last"], [f"{name}.s"], name=f"{name}_mean"),
            helper.make_node("MatMul", [f"{name}.s", f"{name}.w"], [f"{name}.m"], name=f"{name}_mix"),
        ]
    made = "y" if classes else "total"
    nodes += [helper.make_node("Sum", [f"{name}.m" for name in inputs], [made], name="all")]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
    result = helper.make_tensor_value_info(made, TensorProto.FLOAT, ["batch", 5] if classes else [])
    graph = helper.make_graph(nodes, "m", given, [result], weights if classes else [])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def source(inputs: Dims, *, classes: bool = True) -> Source:
    return Source(from_proto(network(inputs, classes=classes), Path("model.onnx")))


def answer(inputs: Dims, plan: str) -> dict[str, int]:
    """The dims along which inputs hold records, as the passes of a program know them; the labels left out."""
    given = source(inputs, classes="labels" in plan)
    program = start(given, parse_plan(f"ranks: 1\n{plan}", "plan.yaml"), "model.onnx")
    found = run_passes(program, shapes).batch_dims
    return {str(value.name): dim for value, dim in found.items() if value.name != "label"}


def feeds(inputs: Dims, records: int) -> dict[str, np.ndarray]:
    rng, sizes = np.random.default_rng(records), {"batch": records, "seq": 3, "rows": 2}
    shapes = {name: [sizes.get(str(dim), dim) for dim in dims] for name, dims in inputs.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def labels(records: int) -> dict[str, np.ndarray]:
    return {"label": np.random.default_rng(records).integers(0, 5, records)}


@pytest.mark.parametrize(
    ("inputs", "want"),
    [
        ({"x": [16, "batch", 8]}, {"x": 1}),
        ({"x": ["batch", 8], "z": [3, "batch"]}, {"x": 0, "z": 1}),
        ({"x": ["batch", 8], "t": [1], "z": ["rows", 2]}, {"x": 0, "z": 0}),
        ({"x": ["batch", "rows"], "z": ["rows", 2]}, {"x": 0}),
        ({"x": [4, 8], "z": [4], "u": [8, 4]}, {"x": 0, "z": 0}),
        ({"x": ["seq", "batch", 8], "t": ["seq"]}, {"x": 0, "t": 0}),
    ],
)
def test_an_input_holds_records_along_the_dim_of_the_batch(inputs: Dims, want: Mapping[str, int]) -> None:
    assert answer(inputs, MICROBATCHES) == answer(inputs, OWN) == answer(inputs, OWN + MICROBATCHES) == want


def test_labels_and_the_plan_say_more() -> None:
    inputs, said = {"x": ["seq", "batch", 8], "t": ["batch", "seq"]}, "batch_dims: {x: 1}\n"
    for plan in (TRAIN, TRAIN + said, OWN + said, said + MICROBATCHES):
        assert answer(inputs, plan) == {"x": 1, "t": 0}
    assert answer({"x": ["batch", 8], "z": ["rows"]}, OWN + "batch_dims: {z: null}\n") == {"x": 0}
    assert answer({"x": [16, 4, 8], "z": [4, 2]}, OWN + said) == {"x": 1, "z": 0}


def drawn(seed: int) -> tuple[dict[str, list[int | str]], str]:
    """Inputs that have the batch at any dim, and what the plan says of the first one where another dynamic dim stands before it."""
    chance = random.Random(seed)
    inputs: dict[str, list[int | str]] = {}
    for name in chance.sample(["x", "z", "u"], chance.choice([1, 2, 3])):
        dims: list[int | str] = [chance.choice([2, 3, 4, "seq"]) for _ in range(chance.choice([1, 1, 2]))]
        inputs[name] = (
            [*dims, "batch"]
            if chance.random() < 0.4
            else chance.choice([["batch", *dims], [dims[0], "batch", *dims[1:]]])
        )
    first, dims = next(iter(inputs.items()))
    return inputs, f"batch_dims: {{{first}: {dims.index('batch')}}}\n" if "seq" in dims[: dims.index("batch")] else ""


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_do_with_the_answer_what_the_whole_batch_does(seed: int, tmp_path: Path) -> None:
    inputs, said = drawn(seed)
    want = {name: dims.index("batch") for name, dims in inputs.items()}
    even = "symbols: {batch: {divisor: 4}}\n"
    assert answer(inputs, TRAIN) == answer(inputs, said + even + MICROBATCHES) == want
    plan = f"ranks: 2\n{said}{even}placement: {{'**': 0, all: 1}}\n"
    given = [feeds(inputs, records) for records in (4, 8)]
    same_as_whole(network(inputs, classes=True), plan + MICROBATCHES, *given, rtol=1e-6, atol=1e-6, checked=True)
    steps = [{**one, **labels(records)} for one, records in zip(given, (4, 8), strict=True)]
    whole = run_whole(source(inputs), "ranks: 1\n" + TRAIN, steps)
    dealt = f"ranks: 2\n{even}dataset: data_parallel\n{TRAIN}  accumulate: 2\n"
    for name, text in (("stages", plan + MICROBATCHES + TRAIN), ("dealt", dealt)):
        have = run(source(inputs), text, tmp_path / name, steps)
        assert [float(one["loss"]) for one in have.outputs] == pytest.approx(
            [float(one["loss"]) for one in whole.outputs]
        )
        for tensor, array in whole.after.items():
            np.testing.assert_allclose(have.after[tensor], array, rtol=1e-5, atol=1e-6, err_msg=tensor)
        assert have.program.warnings == ()


def test_data_has_its_records_first(tmp_path: Path) -> None:
    """Of an input that holds them along another dim, too: the loader turns them, on each rank its own."""
    inputs: Dims = {"x": [3, "batch", 4], "t": [2]}
    text = TRAIN.replace("label}", "label}\n  metrics: [accuracy]") + "  accumulate: 2\n"
    plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 4}}}}\ndataset: data_parallel\n{text}"
    proto = network({"x": inputs["x"]}, classes=True)
    compiled(proto, plan, tmp_path / "build")
    assert check_artifact(tmp_path / "build") == []
    manifest = open_artifact(tmp_path / "build").manifest
    assert [(port.name, port.batch_dim) for port in manifest.inputs if port.shape] == [("x", 1), ("label", 0)]
    records = np.random.default_rng(1).normal(size=(8, 3, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=records, **labels(8))

    def act(trainer: Trainer) -> np.ndarray:
        spec = Spec.parse(str(tmp_path / "data.npz"))
        with open_loader(spec, trainer.ports, trainer.rank, 8, shuffle=False, fixed=trainer.record.fixed) as loader:
            batch = next(loader)
            trainer.train(batch)
            return np.array(batch["x"])

    parts = on_all(tmp_path / "build", 2, act)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), np.moveaxis(records, 0, 1))


TIME_MAJOR = """
from partc.compiler import Input, nn
nn.seed(3)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
inputs = {"x": Input([3, "batch", 6], "float32")}
outputs = ["y"]
"""
PER_POSITION = """train:
  loss: {type: softmax_cross_entropy, logits: y, labels: label, axis: 2, ignore_index: -1REDUCTION}
  optimizer: {type: sgd, lr: 0.5}
"""


@pytest.mark.parametrize(
    "more", ["  accumulate: 2\n", "pipeline: {microbatches: 2, stages: ['0', '1, 2']}\n", "dataset: data_parallel\n"]
)
def test_labels_of_positions_may_hold_records_last(
    more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify` compares what one rank learns of the same data; time comes first, and is not what is cut."""
    (tmp_path / "model.py").write_text(TIME_MAJOR)
    plan = "ranks: 2\nsymbols: {batch: {divisor: 4}}\nbatch_dims: {x: 1, label: 1}\n"
    (tmp_path / "plan.yaml").write_text(plan + PER_POSITION.replace("REDUCTION", "") + more)
    asked = ["verify", str(tmp_path / "model.py"), "--plan", str(tmp_path / "plan.yaml"), "--set", "batch=8"]
    assert invoke(asked) == 0, capsys.readouterr().out


def test_means_of_ranks_are_of_records_that_come_first(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TIME_MAJOR)
    loss = PER_POSITION.replace("REDUCTION", ", reduction: sum_over_ranks")
    plan = parse_plan(f"ranks: 2\nbatch_dims: {{x: 1, label: 1}}\n{loss}", "plan.yaml")
    with pytest.raises(CompileError, match=r"plan.yaml:2: 'label' does not hold its records along dim 0"):
        compile_source(load(tmp_path / "model.py"), plan, tmp_path / "build")


@pytest.mark.parametrize(
    ("inputs", "plan", "words"),
    [
        ({"x": ["batch", "batch"]}, MICROBATCHES, ["plan.yaml:2", "dim 1 of input 'x' is 'batch'", "along dim 0", "another name"]),
        ({"x": ["batch", "batch"]}, OWN + "  accumulate: 2\n", ["plan.yaml:5", "dim 1 of input 'x' is 'batch'"]),
        ({"x": ["batch", 4], "z": ["batch"]}, "batch_dims: {z: null}\n" + MICROBATCHES, ["dim 0 of input 'z'", "holds none"]),
        ({"x": ["batch", 4]}, "batch_dims: {q: 0}\n", ["plan.yaml:2", "no input 'q'", "'x'"]),
        ({"x": ["batch", 4]}, "batch_dims: {x: 2}\n", ["plan.yaml:2", "'x' has 2 dims", "null"]),
        ({"x": ["batch", 4]}, "batch_dims: {x: -1}\n", ["batch dim of 'x': expected at least 0"]),
        ({"x": ["batch", 4]}, "batch_dims: 1\n", ["write batch_dims: {x: 1"]),
    ],
)  # fmt: skip
def test_contradictions_are_refused(inputs: Dims, plan: str, words: Sequence[str]) -> None:
    with pytest.raises(CompileError) as error:
        answer(inputs, plan)
    for word in words:
        assert word in str(error.value)
