"""Weights of 16 bits that are computed in float32 stay 16 bits in the artifact, and give the bits of widened ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from minimal_ranks import same_as_partc
from partc.cli.comparison.reference import first_values
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.ir.computed import WidenedTensor, shard_of
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime import load_local
from partc.runtime.artifact.format import STORED
from partc.runtime.artifact.graph.bodies import read_model
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.checker.graph.weights import check_weights
from small_training import with_numbers
from training_equivalence import fed, tensors

TEXT = """<ir_version: 10, opset_import: ["": 21]>
net (int64[batch] ids, float[batch, 24] t) => (float[batch, 24] y)
<float[24, 36] table, float[36, 20] first, float[20, 36] second> {
    rows = Gather <axis: int = 0> (table, ids)
    [hidden] hidden = MatMul (rows, first)
    [back] back = MatMul (hidden, second)
    head = Transpose <perm: ints = [1, 0]> (table)
    y = MatMul (back, head)
}
"""
SHARDED = """ranks: 2
mesh: {tp: 2}
sharding: {hidden: {parameters: {first: [null, tp]}}, back: {parameters: {second: [tp, null]}}}
"""
TRAINED = "train: {loss: {type: mean_squared, prediction: y, target: t}, optimizer: {type: adam, lr: 0.1}}\n"
STEP: dict[str, Any] = {"ids": np.array([3, 1, 4, 1, 5, 23]), "t": np.ones((6, 24), np.float32)}


def compiled(out: Path, plan: str, narrow: Any, wide: bool = False) -> Path:
    """The network whose weights a file has in the type `narrow`; with `wide` the same numbers in float32."""
    model = from_proto(with_numbers(TEXT), Path("net.onnx"))
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        numbers = value.const_value.numpy().astype(narrow)
        stored = WidenedTensor(ir.Tensor(numbers), ir.DataType.FLOAT, name)
        value.const_value = ir.Tensor(numbers.astype(np.float32)) if wide else stored
    compile_source(Source(model), parse_plan(plan, "plan.yaml"), out)
    return out


def size(folder: Path) -> int:
    """The bytes of all weights: files begin with a page that has the header."""
    return sum(file.stat().st_size - 4096 for file in folder.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("narrow", "plan"),
    [(np.float16, "ranks: 1\n"), (np.float16, SHARDED), (ml_dtypes.bfloat16, SHARDED + TRAINED)],
)
def test_they_take_half_the_disk_and_give_the_bits_of_wide_ones(tmp_path: Path, narrow: Any, plan: str) -> None:
    """Outputs, and after a step of training the parameters, with their columns or rows on two ranks, in both runtimes."""
    folders = [compiled(tmp_path / "narrow", plan, narrow), compiled(tmp_path / "wide", plan, narrow, wide=True)]
    assert size(folders[0]) == 2 * (24 * 36 + 36 * 20 + 20 * 36)
    assert size(folders[1]) == 2 * size(folders[0])
    found = []
    for folder in folders:
        assert check_artifact(folder) == []
        with load_local(folder, threads=1) as ranks:
            step = {**(fed(ranks, 0) if ranks.manifest.training else {}), **STEP}
            found.append({**ranks({port.name: step[port.name] for port in ranks.inputs}), **tensors(ranks)})
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], name)
    if plan.startswith("ranks: 1"):
        same_as_partc(folders[0], 1, [STEP], rtol=1e-6)


def test_another_type_than_that_of_the_file_is_found(tmp_path: Path) -> None:
    """The type is in the rank file and in the header of the weights, and it is one that is widened exactly."""
    folder = compiled(tmp_path / "build", "ranks: 1\n", ml_dtypes.bfloat16)
    manifest = open_artifact(folder).manifest
    facts = {
        "float16": "its data in weights/rank_0000.safetensors is BF16, and it is a float16",
        "int16": "its data is said to be 'int16', and it is float",
        "": "it has 1728 bytes of data, and its type and shape need 3456",
    }
    for text, fact in facts.items():
        model = read_model(folder / manifest.program(0))
        (entry,) = [entry for entry in model.graph.initializer[0].metadata_props if entry.key == STORED]
        entry.value = text
        assert fact in [found.fact for found in check_weights(folder, "rank_0000.onnx", model, manifest)]


def test_a_box_of_a_mapped_tensor_leaves_nothing_mapped(tmp_path: Path) -> None:
    """Rows, columns, and none, of a file whose tensor begins at any byte."""
    numbers = np.arange(60, dtype=np.float32).reshape(5, 4, 3)
    (tmp_path / "w.data").write_bytes(bytes(7) + numbers.astype(ml_dtypes.bfloat16).tobytes())
    place = ("w.data", 7, 120, ir.DataType.BFLOAT16)
    tensor = ir.ExternalTensor(*place, shape=ir.Shape([5, 4, 3]), name="w", base_dir=tmp_path)
    for box in (np.s_[1:4, 0:4, 0:3], np.s_[0:5, 1:3, 2:3], np.s_[2:2, 0:4, 0:1]):
        shard = shard_of(WidenedTensor(tensor, ir.DataType.FLOAT, "w"), box)
        np.testing.assert_array_equal(shard, numbers[box])
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_training_begins_with_the_widened_numbers(tmp_path: Path) -> None:
    """As `verify` reads them."""
    plan = f"ranks: 1\n{TRAINED}"
    first = [
        first_values(folder, open_artifact(folder).manifest)
        for folder in (compiled(tmp_path / str(wide), plan, np.float16, wide) for wide in (False, True))
    ]
    for name, array in first[1].items():
        np.testing.assert_array_equal(first[0][name], array)
