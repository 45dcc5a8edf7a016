"""Which neighbours are heard when shardings are derived: stored weights last, values that grow with the square of a symbol first."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from equivalence import same_as_whole
from partc.cli.output.stats import rank_stats
from partc.compiler.pipeline import compile_model
from partc.runtime.artifact.manifest import open_artifact
from sharded_models import with_weights

SAMPLE = Path(__file__).parents[2] / "samples" / "gpt" / "model.py"
TRAIN = """
train:
  loss: {type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2, ignore_index: -1}
  optimizer: {type: adamw, lr: 0.001, weight_decay: 0.1}
"""
DATA_PARALLEL = (
    "ranks: 4\nmesh: {dp: 4}\nsymbols: {batch: {divisor: 4, max: 16}, seq: {max: 128}}\ndataset: data_parallel\n"
)
STORED = """sharding:
  "layers.*.*.{project,out}": {parameters: {weight: [4, 1]}}
  "{tokens,positions,head}": {parameters: {weight: [4, 1]}}
"""
CUT = """ranks: 4
mesh: {cp: 4}
symbols: {batch: {max: 4}, seq: {divisor: 4, max: 128}}
dataset: {ids: [null, cp], labels: [null, cp]}
outputs: cut
"""


def received(plan: str, folder: Path, **sizes: int) -> tuple[int, str]:
    """The bytes that rank 1 receives in a step of the sample's training at these sizes, and the expression of them."""
    (folder / "plan.yaml").write_text(plan + TRAIN)
    compile_model(SAMPLE, folder / "plan.yaml", folder / "build")
    moved = rank_stats(open_artifact(folder / "build"), 1, sizes).received
    return moved.bytes, moved.text


def test_a_gpt_stored_in_shards_receives_no_more_than_data_parallel(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (stored := tmp_path / "stored").mkdir()
    most, _ = received(DATA_PARALLEL, whole, batch=16, seq=128)
    bytes, text = received(DATA_PARALLEL + STORED, stored, batch=16, seq=128)
    assert bytes <= 1.02 * most
    assert "batch*seq" not in text.replace(" ", "").replace(
        "batch*seq/4)", ""
    )  # of activations rows of tables alone travel
    assert len(re.findall("ReduceScatter", (stored / "build/ir/step_parallel_end.ir").read_text())) > 0


def test_a_gpt_of_a_cut_sequence_receives_keys_and_values(tmp_path: Path) -> None:
    _, text = received(CUT, tmp_path, batch=4, seq=128)
    assert "batch*seq" in text
    assert "seq**2" not in text


ATTENTION = """<ir_version: 10, opset_import: ["" : 21]> main (float[batch, seq, 6] x) => (float[batch, seq, 6] y) {
    [keys] k = Transpose <perm = [0, 2, 1]> (x)
    [scores] s = MatMul (x, k)
    [shares] p = Softmax (s)
    [values] y = MatMul (p, x)
}"""


@pytest.mark.parametrize("most", ["", ", max: 8"])
def test_scores_outweigh_values_whatever_a_symbols_bounds(most: str) -> None:
    plan = f"ranks: 2\nsymbols: {{seq: {{divisor: 2{most}}}}}\ndataset: {{x: [1, 2, 1]}}\noutputs: {{y: cut}}\n"
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 4, 6), dtype=np.float32)}
    program = same_as_whole(with_weights(ATTENTION, {}), plan, feeds, rtol=1e-5, atol=1e-5)
    assert {event.value.name for event in program.events} <= {"x", "k"}


TWO = """<ir_version: 10, opset_import: ["" : 21]> main (float[batch, 6] x) => (float[batch, 4] y) {
    [up] h = MatMul (x, v)
    [down] y = MatMul (h, w)
}"""


@pytest.mark.parametrize(("dataset", "moved"), [("dataset: data_parallel\n", {"v", "y"}), ("", {"y"})])
def test_a_stored_weight_is_heard_where_nothing_else_shards_its_readers(dataset: str, moved: set[str]) -> None:
    plan = f"ranks: 2\nsymbols: {{batch: {{divisor: 2}}}}\n{dataset}sharding: {{up: {{parameters: {{v: [1, 2]}}}}}}\n"
    feeds = {"x": np.random.default_rng(1).standard_normal((4, 6), dtype=np.float32)}
    program = same_as_whole(with_weights(TWO, {"v": (6, 8), "w": (8, 4)}), plan, feeds, rtol=1e-5, atol=1e-5)
    assert {event.value.name for event in program.events} == moved
