"""Weights that several modules read: an exporter's merged ones become each module's own, tied ones stay one; the plan overrules."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import numpy_helper
from partc.cli.commands.compile import command as compile_command
from partc.cli.commands.plan import command as plan_command
from partc.cli.commands.train import command as train_command
from partc.cli.comparison.checkpoint_model import export_model
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.computed import Box, ComputedTensor
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.training.shared import parted, shared_weights
from partc.compiler.training.trainable import _is_mask
from partc.runtime import load_trainer
from partc.runtime.checkpoint.checkpoint import Checkpoint
from partc.runtime.communication.in_process import LocalWorld
from training_equivalence import run, same_tensors

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
TEXT = (
    HEAD
    + """net (float[batch, 4] x) => (float[batch, 4] y) <float[4, 4] tied, float[4] SCALE> {
    [layers__0__linear__MatMul] a = MatMul (x, tied)
    [layers__0__norm__LayerNormalization] b = LayerNormalization (a, FIRST)
    [layers__1__linear__MatMul] c = MatMul (b, tied)
    [layers__1__norm__LayerNormalization] d = LayerNormalization (c, SECOND)
    [layers__2__norm__Mul] y = Mul (d, THIRD)
}"""
)
TRAIN = "train:\n  loss: {type: mean_squared, prediction: y, target: t}\n  optimizer: {type: momentum, lr: 0.2}\n"
TIED = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def proto(*names: str) -> onnx.ModelProto:
    """The model with norms whose scales have these names."""
    text = TEXT.replace("float[4] SCALE", ", ".join(f"float[4] {name}" for name in dict.fromkeys(names)))
    for word, name in zip(("FIRST", "SECOND", "THIRD"), names, strict=True):
        text = text.replace(word, name)
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.name = node.name.replace("__", ".")
    for name in dict.fromkeys(names):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), name))
    model.graph.initializer.append(numpy_helper.from_array(TIED, "tied"))
    return model


def steps() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{name: rng.normal(size=(6, 4)).astype(np.float32) for name in ("x", "t")} for _ in range(3)]


def trained(model: onnx.ModelProto, folder: Path, more: str = "", around: str = "ranks: 1\n") -> dict[str, np.ndarray]:
    return run(Source(from_proto(model, Path("model.onnx"))), around + TRAIN + more, folder, steps()).after


@pytest.mark.parametrize("around", ["ranks: 1\n", "ranks: 2\ndataset: data_parallel\nsymbols: {batch: {divisor: 2}}\n"])
def test_what_an_exporter_merged_is_each_modules_own(around: str, tmp_path: Path) -> None:
    have = trained(proto("ones", "ones", "ones"), tmp_path / "merged", around=around)
    want = trained(proto("one", "two", "three"), tmp_path / "apart")
    names = {"layers.1.norm.ones": "two", "layers.2.norm.ones": "three", "ones": "one", "tied": "tied"}
    renamed = {
        names[name.removesuffix(".momentum")] + ".momentum" * name.endswith(".momentum"): have[name] for name in have
    }
    same_tensors(renamed, want, {name: np.zeros_like(array) for name, array in want.items()}, 1e-5)
    assert not np.allclose(have["ones"], have["layers.1.norm.ones"])


def test_the_plan_has_the_last_word(tmp_path: Path) -> None:
    one = trained(proto("ones", "ones", "ones"), tmp_path / "one", "  parameters: {ones: {shared: true}}\n")
    assert {name for name in one if not name.endswith(".momentum")} == {"tied", "ones"}
    own = trained(proto("ones", "ones", "ones"), tmp_path / "own", "  parameters: {tied: {shared: false}}\n")
    assert not np.allclose(own["tied"], own["layers.1.linear.tied"])
    frozen = trained(proto("ones", "ones", "ones"), tmp_path / "frozen", "  parameters: {ones: {frozen: true}}\n")
    assert np.array_equal(frozen["ones"], np.ones(4))
    assert {name for name in frozen if not name.endswith(".momentum")} == {"tied", "ones"}


def test_both_are_told(tmp_path: Path) -> None:
    onnx.save(proto("ones", "ones", "ones"), tmp_path / "model.onnx")
    (tmp_path / "plan.yaml").write_text("ranks: 1\n" + TRAIN)
    paths = [str(tmp_path / name) for name in ("model.onnx", "plan.yaml", "build")]
    said = CliRunner().invoke(compile_command, [paths[0], "--plan", paths[1], "-o", paths[2]]).output
    assert "'tied' is read by layers.0.linear, layers.1.linear: they share one parameter\n" in said
    norms = "layers.0.norm, layers.1.norm, layers.2.norm"
    assert f"'ones' is read by {norms}, and repeats one number: each has a parameter of its own\n" in said
    plan = CliRunner().invoke(plan_command, [paths[0]]).output
    assert "#     tied: {shared: false}   # 'tied' is read by layers.0.linear" in plan
    assert "#     ones: {shared: true}   # 'ones' is read by layers.0.norm" in plan


def test_a_checkpoint_goes_back_into_the_model(tmp_path: Path) -> None:
    onnx.save(proto("ones", "ones", "ones"), tmp_path / "model.onnx")
    trained(proto("ones", "ones", "ones"), tmp_path / "build")
    with load_trainer(tmp_path / "build", LocalWorld(1).transport(0)) as trainer:
        for step in steps():
            trainer.train(step)
        kept = {record.tensor: array.copy() for record, array in trainer.program.state.arrays()}
        path = trainer.save(tmp_path / "runs")
    assert export_model(Checkpoint.open(path), tmp_path / "model.onnx", tmp_path / "out.onnx") == 4
    made = {one.name: numpy_helper.to_array(one) for one in onnx.load(tmp_path / "out.onnx").graph.initializer}
    for name, array in made.items():
        assert np.array_equal(array, kept[name]), name
    assert {*made} == {"tied", "ones", "layers.1.norm.ones", "layers.2.norm.ones"}


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_that_an_exporter_parted_is_told(tied: bool, tmp_path: Path) -> None:
    """Its first row may be the zeros of a padding; weights that are alike in nothing but a row are not meant."""
    text = HEAD + "net (int64[batch] x) => (float[batch, 6] y) { r = Gather (table, x) y = MatMul (r, folded) }"
    table = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    table[0] = 0
    folded = table.T + (0 if tied else np.float32(1) * (np.arange(6) == 5))
    model = onnx.parser.parse_model(text)
    for name, array in (("table", table), ("folded", folded)):
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    plan = parse_plan("ranks: 1\n" + TRAIN, "plan.yaml")
    report = compile_source(Source(from_proto(model, Path("net.onnx"))), plan, tmp_path / "build")
    told = [line for line in report.warnings if "'folded' has the numbers of 'table' transposed" in line]
    assert bool(told) == tied


def test_plan_compile_and_train_state_one_number(tmp_path: Path) -> None:
    """A scale that three norms share is three parameters; a constant is none, whatever the file lists as initializers."""
    model = proto("ones", "ones", "ones")
    model.graph.node.append(onnx.helper.make_node("Reshape", ["y", "sizes"], ["z"], "Reshape"))
    model.graph.output[0].name = "z"
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 4], np.int64), "sizes"))
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **steps()[0])
    text = f"ranks: 1\n{TRAIN}  data: data.npz\n  batch: 3\n  steps: 1\n".replace("prediction: y", "prediction: z")
    (tmp_path / "plan.yaml").write_text(text)
    names = [str(tmp_path / name) for name in ("model.onnx", "plan.yaml", "build")]
    said = [
        CliRunner().invoke(plan_command, names[:1]).output,
        CliRunner().invoke(compile_command, [names[0], "--plan", names[1], "-o", names[2]]).output,
        CliRunner().invoke(train_command, [names[2], "--plan", names[1], "--in-process"]).output,
    ]
    found = [re.search(r"(\d+) parameters(?: of |, )(\d+) elements", one) for one in said]
    assert [one and one.groups() for one in found] == [("4", "28")] * 3, said


def test_of_weights_that_are_computed_the_beginning_alone_is_read() -> None:
    """A mask, a repeated number, another weight transposed: no weight is in memory for it, however large it is."""
    read: list[int] = []

    def compute(box: Box, factor: int) -> np.ndarray[Any, Any]:
        rows, columns = (np.arange(one.start, one.stop, dtype=np.float32) for one in box)
        read.append(rows.size * columns.size)
        return rows[:, None] * factor + columns

    weights = []
    for name, shape in (("one", (5000, 9000)), ("other", (9000, 5000))):
        tensor = ComputedTensor(partial(compute, factor=shape[0]), ir.DataType.FLOAT, shape, name)
        weights.append(ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor))
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=weights, opset_imports={"": 21}), ir_version=10)
    assert not _is_mask(weights[0], (5000, 9000))
    assert parted(model, ["one", "other"]) == []
    results = [ir.Value(name=f"{module}.y") for module in ("first", "second")]
    readers = [ir.Node("", "Neg", [weights[0]], outputs=[one], name=one.name) for one in results]
    model.graph.extend(readers)
    assert [(one.modules, one.repeats) for one in shared_weights(model, ["one"])] == [(("first", "second"), False)]
    assert 0 < max(read) <= 9000
