"""Copies of a tensor stay equal: what the proof takes for the same, and what it does not."""

from __future__ import annotations

from pathlib import Path

import onnx
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.check import check_artifact
from partc.runtime.checker.training.value_numbering import ValueNumbering, check_replicas, copies_of
from small_training import compiled


def test_an_operand_that_is_expanded_on_one_rank_and_broadcast_on_another_makes_the_same(tmp_path: Path) -> None:
    model = """<ir_version: 10, opset_import: ["" : 21]>
    main (float[batch, 6] x) => (float[batch, 6] y) <float[6] w, float[1, 6] v> {
        [scaled] a = Mul(w, x)
        [size] s = Shape(a)
        [wide] b = Expand(v, s)
        [both] y = Mul(a, b)
    }"""
    plan = """
ranks: 3
symbols: {batch: {divisor: 3}}
dataset: data_parallel
sharding: {scaled: {in: [null, [1, 1]]}, both: {in: [[1, 1], [1, 1]]}}
placement: {wide: [0, 2], loss: 2}
"""
    build = compiled(tmp_path / "build", model, plan)
    rank_files = [onnx.load(build / f"rank_000{rank}.onnx", load_external_data=False) for rank in (0, 2)]
    assert [any("b" in node.output for node in file.graph.node) for file in rank_files] == [
        True,
        False,
    ]  # rank 0 sends it
    assert not check_artifact(build)

    manifest = open_artifact(build).manifest
    forged = onnx.load(build / "rank_0002.onnx", load_external_data=False)
    for node in forged.graph.node:
        node.input[:] = ["w" if name == "v" and node.op_type == "Mul" else name for name in node.input]
    models = {
        rank: forged if rank == 2 else onnx.load(build / f"rank_000{rank}.onnx", load_external_data=False)
        for rank in range(3)
    }
    (found,) = check_replicas(
        ValueNumbering(build, manifest, models), [one for one in copies_of(manifest) if one[0][1].value == "w"]
    )
    assert "may become another one than on rank 0" in found.fact
