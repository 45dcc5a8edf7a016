"""Gradients in eight bits: trainings are close to float32's, ranks have the same bits, and what rounding leaves is sent later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import training_models as models
from mutated import change_file, texts
from partc.compiler.errors import CompileError
from partc.compiler.ir.program import Complete
from rows import of_today
from training_command_case import ONE, PARALLEL, built, folder, tensors, train
from training_equivalence import Run, from_text, run, run_whole, source_of, train_whole

__all__ = ["folder"]

PACKED = "messages: {gradients: {bits: 8, block: 16, keep_rest: true}}\n"
TRAIN = """train:
  loss: {type: softmax_cross_entropy, logits: y, labels: labels}
  optimizer: {type: momentum, lr: 0.1, momentum: 0.9%s}
  bucket_mb: 0.002
%s"""
DATA = "ranks: 4\nmesh: {dp: 4}\ndataset: data_parallel\nsymbols: {batch: {divisor: 8}}\n"
STORED = "ranks: 4\nmesh: {dp: 4}\ndataset: data_parallel\nparameters: {'**': {stored: dp}}\n"
REPLICAS = """ranks: 4
mesh: {replica: 2, shard: 2}
dataset: {x: [[replica, shard], null]}
parameters: {'**': {stored: shard}}
"""
GRID = """ranks: 4
mesh: {dp: 2, tp: 2}
dataset: data_parallel
symbols: {batch: {divisor: 2}}
sharding: {layers.0: colwise, layers.1: rowwise}
"""
PLANS = {
    "accumulated, clipped": DATA + TRAIN % ("", "  accumulate: 2\n  clip: {norm: 1.0}\n"),
    "zero, in float16": DATA + "precision: {compute: float16, loss_scale: 64}\n" + TRAIN % (", shard: true", ""),
    "zero on a grid": GRID + TRAIN % (", shard: true", ""),
    "in stages": "placement: {layers.0: {pp: 0}, 'layers.*': {pp: 1}}\npipeline: {microbatches: 2}\n"
    + DATA.replace("mesh: {dp: 4}", "mesh: {pp: 2, dp: 2}")
    + TRAIN % ("", ""),
}


def mlp_run(plan: str, place: Path) -> Run:
    one = models.mlp(width=20, inputs=7)
    records = one.feeds(np.random.default_rng(1), batch=16)
    return run(source_of(one), plan, place, [records] * 12)


@pytest.mark.parametrize("name", of_today([*PLANS], 2))
def test_a_training_in_eight_bits_is_close_to_that_in_float32(name: str, tmp_path: Path) -> None:
    """`run` holds what several ranks have of a tensor to be the same bits."""
    plan = PLANS[name]
    one = models.mlp(width=20, inputs=7)
    records = one.feeds(np.random.default_rng(1), batch=16)
    want = run_whole(source_of(one), train_whole(plan), [records] * 12)
    have = mlp_run(plan + PACKED, tmp_path / "packed")
    assert texts(tmp_path / "packed") == ""
    losses = [[float(outputs["loss"]) for outputs in steps.outputs] for steps in (have, want)]
    np.testing.assert_allclose(*losses, rtol=0, atol=0.01)
    assert losses[1][0] - losses[1][-1] > 0.1
    for weight in (weight for weight in want.after if weight.endswith("weight")):
        far = np.abs(want.after[weight] - want.before[weight]).max()
        np.testing.assert_allclose(have.after[weight], want.after[weight], rtol=0, atol=0.1 * far, err_msg=weight)


def received(program: Complete) -> int:
    """The bytes that a rank receives of gradients in a step."""
    return sum(int(event.bytes) for event in program.events if event.cause.startswith("gradient"))


def test_a_message_has_a_byte_a_number_and_a_scale_a_block(tmp_path: Path) -> None:
    plan = "ranks: 4\ndataset: data_parallel\nsymbols: {B: {divisor: 4}}\n" + SUMS % 0.5
    programs = [constant_run(plan + more, tmp_path / name, 1, 16).program for name, more in (("a", ""), ("b", KEPT))]
    exact, packed = map(received, programs)
    assert (exact, packed) == (2 * 3 * 64 * 4 * 4 // 4, 2 * 3 * (64 + 64 // 16 * 4) * 4 // 4)
    stored = constant_run(STORED + "symbols: {B: {divisor: 4}}\n" + SUMS % 0.5 + KEPT, tmp_path / "c", 1, 16)
    assert received(stored.program) == packed // 2


LINEAR = """<ir_version: 10, opset_import: ["" : 21]>
net (float[B, 16] x) => (float y) {
    h = MatMul (x, w)
    y = ReduceMean <keepdims = 0> (h)
}
"""
SUMS = "train:\n  loss: y\n  optimizer: {type: sgd, lr: %s}\n"
KEPT = "messages: {gradients: {block: 16}}\n"


def constant_run(plan: str, place: Path, steps: int, columns: int = 5) -> Run:
    """A training whose gradient is the same in each step, and different on each rank."""
    x = np.random.default_rng(3).lognormal(0, 3, (8, 16)).astype(np.float32)
    return run(from_text(LINEAR, {"w": (16, columns)}), plan, place, [{"x": x}] * steps)


@pytest.mark.parametrize("shard", of_today(["", ", shard: true"], 1))
def test_what_rounding_leaves_is_added_in_the_next_step(shard: str, tmp_path: Path) -> None:
    """After many steps the parameter is off by what is left of one step; without the rest, by as much in each step."""
    steps = 150
    plan = "ranks: 4\ndataset: data_parallel\nsymbols: {B: {divisor: 4}}\n" + (SUMS % 1.0).replace("}", f"{shard}}}")
    change = {}
    for name, more in (("exact", ""), ("kept", KEPT), ("lost", KEPT.replace("16}", "16, keep_rest: false}"))):
        have = constant_run(plan + more, tmp_path / name, steps)
        change[name] = have.after["w"] - have.before["w"]
    off = {name: float(np.abs(change[name] - change["exact"]).max()) for name in ("kept", "lost")}
    assert off["kept"] < float(np.abs(change["exact"]).max()) / steps * 2 / 127
    assert off["lost"] > 5 * off["kept"]


def packed_and_back(numbers: np.ndarray, block: int = 16) -> np.ndarray:
    """Numbers as they arrive: integers of eight bits by blocks, times the block's scale."""
    blocks = numbers.reshape(-1, block)
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
    return np.asarray((np.round(blocks / scales) * scales).reshape(numbers.shape))


class Senders:
    """Ranks that add up numbers, each with what rounding has left of its own numbers of the step before."""

    def __init__(self) -> None:
        self.rest: Any = 0

    def sum(self, numbers: np.ndarray) -> np.ndarray:
        carried = numbers + self.rest
        sent = np.stack([packed_and_back(own) for own in carried])
        self.rest = carried - sent
        return np.asarray(sent.sum(0))


@pytest.mark.parametrize("plan", [STORED, REPLICAS])
def test_the_gradient_of_a_stored_parameter_is_the_sum_of_rounded_parts(plan: str, tmp_path: Path) -> None:
    """Replicas add up shards that have been added up, and round them again: a share to its owner, and the sum for all."""
    x = np.random.default_rng(3).lognormal(0, 3, (8, 16)).astype(np.float32)
    plan += "symbols: {B: {divisor: 4}}\n" + SUMS % 1.0 + KEPT
    have = run(from_text(LINEAR, {"w": (16, 16)}), plan, tmp_path / "build", [{"x": x}] * 3)
    assert texts(tmp_path / "build") == ""
    gradients = (x.reshape(4, 2, 16).sum(1)[:, :, None] / np.float32(8 * 16)).repeat(16, axis=2)
    owners, shares, sums = Senders(), [Senders(), Senders()], [Senders(), Senders()]
    want = have.before["w"].copy()
    for _ in range(3):
        if plan.startswith(STORED):
            want -= owners.sum(gradients)
            continue
        scattered = np.stack([shares[replica].sum(gradients[2 * replica : 2 * replica + 2]) for replica in range(2)])
        want -= sums[0].sum(sums[1].sum(scattered)[None])
    np.testing.assert_allclose(have.after["w"], want, rtol=2e-6, atol=1e-6)


def test_a_gradient_that_is_not_finite_arrives_as_one(tmp_path: Path) -> None:
    plan = "ranks: 4\ndataset: data_parallel\nsymbols: {B: {divisor: 4}}\n" + SUMS % 1.0 + KEPT
    for number in (np.nan, np.inf):
        x = np.ones((8, 16), np.float32)
        x[5, 3] = number
        have = run(from_text(LINEAR, {"w": (16, 16)}), plan, tmp_path / str(number), [{"x": x}])
        assert not np.isfinite(have.after["w"][3]).any()


def test_the_rest_is_in_checkpoints_and_other_plans_go_on_without_it(folder: Path) -> None:
    packed = str(built(folder, PARALLEL + PACKED, "packed"))
    assert train(packed, "--checkpoint", "whole", "--save", "100") == 0
    assert train(packed, "--checkpoint", "kept", "--epochs", "2", "--save", "100") == 0
    assert any(name.endswith("rest") for name in tensors(folder / "kept"))
    assert train(packed, "--checkpoint", "kept", "--resume", "--save", "100") == 0
    assert tensors(folder / "kept") == tensors(folder / "whole")
    for name, plan in (("one", ONE), ("blocks", PARALLEL + PACKED.replace("16", "32"))):
        other = str(built(folder, plan, name))
        assert train(other, "--checkpoint", "kept", "--resume", "--epochs", "5", "--save", "100") == 0


def scaled_by_another(model: onnx.ModelProto) -> None:
    unpacked = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and ".sums." in node.output[0]]
    unpacked[1].input[1] = unpacked[0].input[1]


def kept_without_what_was_carried(model: onnx.ModelProto) -> None:
    left = next(node for node in model.graph.node if node.op_type == "Sub" and node.output[0].endswith("rest.next"))
    left.input[0] = left.input[0].replace("carried", "blocks")


FAULTS = {
    scaled_by_another: "and not its scales",
    kept_without_what_was_carried: "and not as the difference of what is packed",
}


@pytest.mark.parametrize(("fault", "fact"), FAULTS.items())
def test_the_checker_finds_codes_read_otherwise_than_they_were_packed(fault: Any, fact: str, tmp_path: Path) -> None:
    plan = DATA + (TRAIN % ("", "")).replace("0.002", "0.000001") + PACKED.replace("16", "512")
    mlp_run(plan, tmp_path / "build")
    change_file(tmp_path / "build", "rank_0000.onnx", fault)
    assert fact in texts(tmp_path / "build")


TIED = """<ir_version: 10, opset_import: ["" : 21]>
net (float[B, 16] x) => (float y) {
    [one] h = MatMul (x, w)
    [two] z = MatMul (h, w)
    y = ReduceMean <keepdims = 0> (z)
}
"""


def test_a_parameter_of_several_stages_is_refused_by_name(tmp_path: Path) -> None:
    plan = "ranks: 4\nmesh: {pp: 2, dp: 2}\nplacement: {one: {pp: 0}, two: {pp: 1}}\n" + DATA[DATA.index("dataset") :]
    with pytest.raises(CompileError) as error:
        run(from_text(TIED, {"w": (16, 16)}), plan.replace("batch", "B") + SUMS % 1.0 + KEPT, tmp_path, [])
    assert "the gradients of 'w' do not travel in eight bits" in str(error.value)


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (PACKED + "ranks: 1\n", ["plan.yaml:1: 'messages.gradients' without 'train'", "leave out 'messages'"]),
        (
            PACKED + "precision: {compute: float16, messages: bfloat16}\n" + DATA + TRAIN % ("", ""),
            ["plan.yaml:1: 'messages.gradients' beside 'precision.messages'"],
        ),
        (
            PACKED + "stored: {reduce: microbatch}\npipeline: {microbatches: 2}\n" + STORED + TRAIN % ("", ""),
            ["'keep_rest' beside 'reduce: microbatch'", "write keep_rest: false"],
        ),
        (
            PACKED.replace("8", "4") + DATA + TRAIN % ("", ""),
            ["plan.yaml:1", "bits"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(plan: str, parts: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        mlp_run(plan, tmp_path / "build")
    assert all(part in str(error.value) for part in parts), error.value
