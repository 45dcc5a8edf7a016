"""What ranks copy around a collective: side by side where it is of several values, and along another axis than the first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from machines import machine
from partc.compiler.cost.machine import Curve
from partc.compiler.cost.play import Begin, Communicate, Finish
from partc.compiler.cost.step import simulated
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from partc.runtime.artifact.manifest import open_artifact

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 64] x) => (float[batch, 16] y) <float[64, 128] w, float[128, 16] v> {
    [up] a = MatMul (x, w)
    [down] y = MatMul (a, v)
}"""
DATA = """ranks: 2
mesh: {dp: 2}
dataset: data_parallel
symbols: {batch: {divisor: 2}}
train:
  loss: {type: mse, prediction: y, target: label}
  optimizer: {type: momentum, lr: 0.1, momentum: 0.9SHARD}
  batch: 32
"""
COLUMNS = """ranks: 2
symbols: {batch: {min: 1}}
sharding: {up: colwise, down: replicate}
"""
WEIGHTS = 4 * (64 * 128 + 128 * 16)


def copies(folder: Path, plan: str) -> dict[tuple[str, type[Communicate]], float]:
    """By op and end of a collective of more than a number the seconds that the first rank copies, where all of it goes on by itself."""
    proto = onnx.parser.parse_model(MODEL)
    for one, shape in (("w", (64, 128)), ("v", (128, 16))):
        values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, one))
    del proto.graph.input[1:]
    onnx.save(proto, folder / "model.onnx")
    (folder / "plan.yaml").write_text(plan)
    compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
    actions = simulated(open_artifact(folder / "build"), machine(), {"batch": 32}).played.classes[0].actions
    large = {one.tag for one in actions if isinstance(one, Begin) and one.bytes > 4}
    some = [one for one in actions if isinstance(one, Begin | Finish) and one.tag in large]
    return {(one.op, type(one)): one.seconds for one in some}


def test_a_sharded_optimizer_copies_gradients_and_parameters(tmp_path: Path) -> None:
    """Read and written at 1 GB/s: all gradients and the own shard of their sum, the own shard of parameters and all of them."""
    found = copies(tmp_path, DATA.replace("SHARD", ", shard: dp"))
    wanted = {
        (REDUCE_SCATTER, Begin): 2 * WEIGHTS / 1e9,
        (REDUCE_SCATTER, Finish): WEIGHTS / 1e9,
        (ALL_GATHER, Begin): WEIGHTS / 1e9,
        (ALL_GATHER, Finish): 2 * WEIGHTS / 1e9,
    }
    assert found == pytest.approx(wanted)


def test_an_all_reduce_works_where_gradients_lie(tmp_path: Path) -> None:
    assert copies(tmp_path, DATA.replace("SHARD", "")) == {(ALL_REDUCE, Begin): 0.0, (ALL_REDUCE, Finish): 0.0}


def test_columns_are_put_into_their_places(tmp_path: Path) -> None:
    """What is gathered along the last axis comes one rank behind the other."""
    found = copies(tmp_path, COLUMNS)
    assert found == pytest.approx({(ALL_GATHER, Begin): 0.0, (ALL_GATHER, Finish): 2 * 4 * 32 * 128 / 1e9})


def test_what_no_cache_holds_has_the_speed_of_the_largest_amount() -> None:
    """A small amount takes what it takes."""
    one = Curve(((1e3, 1e-6), (1e6, 1e-4), (1e8, 1e-1)))
    assert one.streamed(1e6) == pytest.approx(1e-3) == pytest.approx(10 * one(1e6))
    assert one.streamed(1e3) == 1e-6
