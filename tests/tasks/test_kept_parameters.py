"""Parameters that are kept in other shards than their readers take: gathered to be read, and updated where they are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from partc.compiler.frontend.source import Source
from rows import of_today
from training_equivalence import from_text, same_training

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (int64[batch, 4] ids, float[batch, 12] x) => (float[batch, 12] y) {
  [look] e = Gather (table, ids)
  axes = Constant <value_ints: ints = [1]> ()
  [mean] m = ReduceMean <keepdims = 0> (e, axes)
  [up] h = Gemm <transB = 1> (x, w0, b0)
  [add] a = Add (h, m)
  [act] r = Relu (a)
  [down] y = MatMul (r, w1)
}"""
SHAPES = {"table": (24, 12), "w0": (12, 12), "b0": (12,), "w1": (12, 12)}
RANDOM = np.random.default_rng(0)
STEPS = [
    {
        "ids": RANDOM.integers(0, 24, (24, 4)),
        "x": RANDOM.standard_normal((24, 12), dtype=np.float32),
        "label": RANDOM.integers(0, 12, 24),
    }
    for _ in range(3)
]
DP = "ranks: 4\nmesh: {a: 4}\ndataset: data_parallel\n"
MIXED = "ranks: 4\nmesh: {dp: 2, tp: 2}\ndataset: data_parallel\n"
STAGES = """ranks: 4
mesh: {pp: 2, dp: 2}
dataset: {x: [dp, null], ids: [dp, null], label: [dp]}
placement: {'{look,mean,up}': {pp: 0}, '{add,act,down}': {pp: 1}}
"""
ADAM, ZERO = "{type: adam, lr: 0.05, eps: 0.01}", "{type: adam, lr: 0.05, eps: 0.01, shard: true}"
ROWS = {"table": "4, 1", "w0": "4, 1", "b0": "4", "w1": "1, 4"}
NAMED = {"table": "dp, null", "w0": "dp, null", "b0": "dp", "w1": "null, dp"}
CASES: dict[str, tuple[str, dict[str, str], str, str]] = {
    "data parallel": (DP, ROWS, ADAM, ""),
    "some replicas share a shard": (DP, {"table": "2, 2", "w0": "2, 1", "b0": "2", "w1": "1, 2"}, ZERO, ""),
    "accumulated": (DP, ROWS, ADAM, "  accumulate: 3\n"),
    "clipped": (DP, ROWS, ADAM, "  clip: {norm: 0.05}\n"),
    "norms of shards": (DP, ROWS, "{type: lamb, lr: 0.05}", ""),
    "rows of a table": (DP, ROWS, ADAM, "  parameters: {table: {optimizer: lazy_adam}}\n"),
    "a mesh": (MIXED, {"table": "[dp, tp], null", "w0": "tp, dp", "b0": "dp", "w1": "null, [tp, dp]"}, ADAM, ""),
    "stages": (STAGES, NAMED, ADAM, "pipeline: {microbatches: 4, schedule: 1f1b}\n"),
    "a split backward pass": (STAGES, NAMED, ZERO, "pipeline: {microbatches: 4, schedule: zb_h1, recompute: '**'}\n"),
}


def source() -> Source:
    return from_text(TEXT, SHAPES)


@pytest.mark.parametrize("name", of_today([*CASES], 2))
def test_it_learns_as_one_rank_does(name: str, tmp_path: Path) -> None:
    head, kept, optimizer, more = CASES[name]
    readers = {"look": ["table"], "up": ["w0", "b0"], "down": ["w1"]}
    rules = {node: ", ".join(f"{one}: [{kept[one]}]" for one in ones) for node, ones in readers.items()}
    plan = f"{head}symbols: {{batch: {{divisor: 24}}}}\nsharding:\n" + "".join(
        f"  {node}: {{parameters: {{{said}}}}}\n" for node, said in rules.items()
    )
    plan += f"train:\n  loss: {{type: softmax_cross_entropy, logits: y, labels: label}}\n  optimizer: {optimizer}\n"
    program = same_training(source, plan + more, tmp_path, STEPS, rtol=1e-4, atol=1e-3)
    for part in program.parts:
        for one in part.state:
            assert one.tensor not in SHAPES or any(one.version.layout.cuts), one.tensor
