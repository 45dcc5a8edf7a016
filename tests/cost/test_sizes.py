"""Values whose size a run tells are priced as if all experts had as many rows."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from equivalence import compiled
from expert_layers import CHOICES, SGD, WIDTH, model
from machines import machine
from partc.compiler.cost.memory import memory_of_ranks
from partc.compiler.cost.play import Begin
from partc.compiler.cost.sizes import FileSizes
from partc.compiler.cost.step import simulated
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.program.rank_file import read_rank_file
from partc.runtime.program.steps import Segment

LAYERS, TOKENS, FEW = 2, 48, 8
SHARED = "symbols: {batch: {divisor: 8}}\ndataset: data_parallel\nexperts: {axis: dp}\n"
PLANS = {
    "one rank": ("ranks: 1\n", 1, 0),
    "one rank, trained": (f"ranks: 1\n{SGD}", 1, 0),
    "routed": (f"ranks: 4\nmesh: {{dp: 4}}\n{SHARED}outputs: sharded\n", 4, 2),
    "trained": (f"ranks: 4\nmesh: {{dp: 4}}\n{SHARED}{SGD}", 4, 4),
}


@pytest.mark.parametrize(("name", "tokens"), [*((name, TOKENS) for name in PLANS), ("routed", FEW)])
def test_rows_are_shared_out_evenly(name: str, tokens: int, tmp_path: Path) -> None:
    """Each row is multiplied with one matrix of a stack; in a training each product has two gradients of as many rows."""
    plan, ranks, routes = PLANS[name]
    compiled(model(LAYERS), plan, tmp_path / "a", check=False)
    artifact = open_artifact(tmp_path / "a", trust=True)
    sizes, rows = FileSizes(read_rank_file(artifact, 0), {"batch": tokens}), LAYERS * tokens * CHOICES // ranks
    counted = Counter[str]()
    for step in sizes.file.steps:
        for node in step.formal.nodes if isinstance(step, Segment) else ():
            if node.op_type in ("MatMul", "Gemm") and re.search(r"rows\d+$|Split\.\d+$", node.input[0]):
                given, _ = sizes.of_node(node, step)
                assert given[0] is not None
                assert given[0].sizes is not None
                counted[node.op_type] += given[0].sizes[0]
    assert counted["MatMul"] == 2 * rows
    assert counted["Gemm"] == (4 * rows if "train" in plan else 0)
    simulation = simulated(artifact, machine(), {"batch": tokens})
    assert not simulation.unknown
    assert not any(one.unknown for one in simulation.memory.values())
    actions = simulation.played.classes[0].actions
    sent = [one.bytes for one in actions if isinstance(one, Begin) and one.op in ("Route", "Return")]
    assert sent == [rows // LAYERS * WIDTH * 4] * routes * LAYERS


def test_the_bound_of_rows_is_in_the_memory(tmp_path: Path) -> None:
    """At most all rows of all ranks come to one, and no value between a Route and its Return is left out."""
    compiled(model(), PLANS["routed"][0], tmp_path / "a", check=False)
    found = memory_of_ranks(open_artifact(tmp_path / "a", trust=True), {"batch": TOKENS})
    assert not any(one.unknown for one in found)
