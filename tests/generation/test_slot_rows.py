"""What `partc check` says of a program of a decoder in which one slot's numbers come to another slot."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from decoders import decoder
from onnx import ModelProto, helper, numpy_helper
from partc.compiler.pipeline import compile_model
from partc.runtime.checker.check import check
from run_steps import decide_again

Change = Callable[[ModelProto], None]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether attention is fused the artifact."""
    found = {}
    for fused in (False, True):
        folder = tmp_path_factory.mktemp("slots")
        onnx.save(decoder(fused=fused), folder / "model.onnx")
        (folder / "plan.yaml").write_text("ranks: 1\ngenerate: {slots: 3, length: 32, chunk: 8}\n")
        compile_model(folder / "model.onnx", folder / "plan.yaml", folder / "build")
        found[fused] = folder / "build"
    return found


def before_appending(kind: str, operands: list[np.ndarray], operand: int, **attributes: int) -> Change:  # type: ignore[type-arg]
    """Puts a node before an operand of the first node that appends to a cache."""

    def change(model: ModelProto) -> None:
        graph = model.graph
        at = next(k for k, one in enumerate(graph.node) if one.op_type in ("GroupQueryAttention", "TensorScatter"))
        graph.initializer.extend(numpy_helper.from_array(array, f"odd.{k}") for k, array in enumerate(operands))
        names = [f"odd.{k}" for k in range(len(operands))]
        node = graph.node[at]
        graph.node.insert(
            at, helper.make_node(kind, [node.input[operand], *names], ["odd"], name="odd_node", **attributes)
        )
        graph.node[at + 1].input[operand] = "odd"

    return change


ORDER = np.array([1, 2, 0])
CASES = {
    "keys of another slot, fused": (True, before_appending("Gather", [ORDER], 1, axis=0)),
    "queries of another slot, fused": (True, before_appending("Gather", [ORDER], 0, axis=0)),
    "the position of another slot": (True, before_appending("Gather", [ORDER], 5, axis=0)),
    "entries of another slot": (False, before_appending("Gather", [ORDER], 1, axis=0)),
    "the sum of all slots": (False, before_appending("CumSum", [np.array(0)], 1)),
    "the largest of all slots": (True, before_appending("ReduceMax", [np.array([0])], 2, keepdims=1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_that_reads_or_writes_another_slots_is_named(built: dict[bool, Path], case: str, tmp_path: Path) -> None:
    fused, change = CASES[case]
    folder = tmp_path / "build"
    shutil.copytree(built[fused], folder)
    edit(folder, "rank_0000.onnx", change)
    told = [str(one) for one in check(folder).violations]
    assert any("odd_node" in line and "the cache of its own slot alone" in line for line in told), told


def test_a_prefill_with_more_slots_than_one_is_named(built: dict[bool, Path], tmp_path: Path) -> None:
    folder = tmp_path / "build"
    shutil.copytree(built[True], folder)

    def all_slots(model: ModelProto) -> None:
        port = next(port for port in model.graph.input if port.name.startswith("past"))
        port.type.tensor_type.shape.dim[0].dim_value = 3

    edit(folder, "prefill_rank_0000.onnx", all_slots)
    told = [str(one) for one in check(folder).violations]
    assert any("prefill_rank_0000.onnx" in line and "[1, " in line and "[3, " in line for line in told), told


def edit(folder: Path, name: str, change: Change) -> None:
    """Changes a rank file, and the manifest's hash of it."""
    model = onnx.load(folder / name, load_external_data=False)
    change(model)
    data = model.SerializeToString()
    (folder / name).write_bytes(data)
    index = json.loads((folder / "manifest.json").read_text())
    index["files"][name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(index))
    decide_again(folder)
