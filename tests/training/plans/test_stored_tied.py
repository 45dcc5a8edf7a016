"""A table that is looked up and is the head's weight, stored in shards: each set of ranks that reads it gathers its shards once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.runtime.artifact.format import ALL_GATHER
from partc.runtime.checker.check import check_artifact
from training_equivalence import from_text, same_training

TIED = """<ir_version: 10, opset_import: ["" : 21]>
main (int64[batch, 6] ids) => (float[batch, 6, 12] y) {
    [look] h = Gather(table, ids)
    [mix] a = MatMul(h, w)
    [turn] t = Transpose <perm = [1, 0]> (table)
    [head] y = MatMul(a, t)
}"""
WEIGHTS = {"table": (12, 8), "w": (8, 8)}
TRAIN = """
symbols: {batch: {divisor: 4}}
dataset: {ids: [dp, null], labels: [dp, null]}
train:
  loss: {type: softmax_cross_entropy, logits: y, labels: labels, axis: 2}
  optimizer: {type: adam, lr: 0.01, eps: 0.01}
"""
STORED = 'parameters: {"**": {stored: dp}}\n'
STAGES = (
    f"ranks: 4\nmesh: {{pp: 2, dp: 2}}\nplacement: {{'{{look,mix}}': {{pp: 0}}, '{{turn,head}}': {{pp: 1}}}}\n{STORED}"
)
CUT = f"ranks: 4\nmesh: {{dp: 2, tp: 2}}\nsharding: {{look: embedding_rowwise}}\n{STORED}"
PLANS = {
    "two stages": STAGES + TRAIN,
    "two stages, microbatches": f"{STAGES}pipeline: {{microbatches: 2}}\n{TRAIN}",
    "rows cut": CUT + TRAIN,
    "rows cut, accumulated": f"{CUT}{TRAIN}  accumulate: 2\n",
}


@pytest.mark.parametrize("name", PLANS)
def test_a_tied_table_trains_as_on_one_rank(name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    steps = [{key: rng.integers(0, 12, (8, 6)) for key in ("ids", "labels")} for _ in range(2)]
    program = same_training(lambda: from_text(TIED, WEIGHTS), PLANS[name], tmp_path, steps, rtol=2e-5, atol=2e-3)
    assert not check_artifact(tmp_path / "cut")
    held = {one.version.value.name for one in program.parts[0].state if str(one.value).startswith("table")}
    assert held == {"table"}
    gathers = [event for event in program.events if event.op_type == ALL_GATHER and event.value.name == "table"]
    assert len({event.ranks for event in gathers}) == 2
