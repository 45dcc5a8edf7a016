"""What a rank computes is read there: a replicated node runs on those of its ranks alone on which its result is wanted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from equivalence import same_as_whole
from partc.compiler.ir.program import Complete
from partc.compiler.ir.programs import Comm
from partc.compiler.pipeline import step_program
from partc.compiler.plan.read import parse_plan
from sharded_models import with_weights
from training_equivalence import from_text

WEIGHTS = {"w": (6, 8), "v": (8, 5), "b": (5,)}
NET = """<ir_version: 10, opset_import: ["" : 21]>
m (float[batch, 6] x) => (float[batch, 5] y, float[batch, 8] z) <float[6, 8] w, float[8, 5] v, float[5] b> {
    [up] z = MatMul (x, w)
    [bend] h = Tanh (z)
    [down] c = MatMul (h, v)
    [add] s = Add (c, b)
    [last] y = Relu (s)
}"""
FOUR = "ranks: 4\nsymbols: {batch: {divisor: 4}}\n"
PLANS = {
    "replicated on all ranks": FOUR,
    "delivered on others": FOUR + "outputs: {y: 2, z: [1, 3]}\n",
    "on a list of ranks": FOUR
    + "placement: {up: [0, 1, 2, 3], bend: [2, 3], down: [2, 3]}\nsharding: {up: replicate}\n",
    "behind a sum": FOUR + "sharding: {up: colwise, down: rowwise}\n",
    "data parallel": FOUR + "mesh: {dp: 2, tp: 2}\ndataset: data_parallel\nsharding: {up: colwise, down: rowwise}\n",
    "in stages": FOUR
    + "placement: {up: [0, 1], bend: [0, 1], down: [2, 3], add: [2, 3], last: [2, 3]}\npipeline: {microbatches: 2}\n",
}
TRAIN = "train:\n  loss: {type: mse, prediction: y, target: t}\n  optimizer: {type: adam, lr: 0.01}\n  metrics: [mse]\n"


def unread(program: Complete) -> Iterator[tuple[int, str]]:
    """The ranks and ops of which no result is read on the rank."""
    for part in program.parts:
        read = {held.value for held in part.outputs} | {state.next for state in part.state}
        for step in reversed(part.steps):
            if not isinstance(step, Comm) and read.isdisjoint(step.makes):
                yield part.rank, step.node.op_type
            read.update(step.reads)


@pytest.mark.parametrize("name", PLANS)
def test_what_a_rank_computes_is_read_there(name: str) -> None:
    x = np.random.default_rng(3).standard_normal((8, 6)).astype(np.float32)
    program = same_as_whole(with_weights(NET, WEIGHTS), PLANS[name], {"x": x}, rtol=1e-6, atol=1e-6, checked=True)
    assert [*unread(program)] == []


@pytest.mark.parametrize("name", [name for name in PLANS if name != "delivered on others"])
def test_so_it_is_in_training(name: str) -> None:
    text = NET.replace(", float[batch, 8] z)", ")")
    plan = parse_plan(PLANS[name] + TRAIN, "plan.yaml")
    assert [*unread(step_program(from_text(text, WEIGHTS), plan, "model"))] == []
