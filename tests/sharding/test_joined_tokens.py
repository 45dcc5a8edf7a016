"""Reshapes that join tokens with the batch, under a plan's `context`: equal training, no gathers, and what stays a plain Reshape."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from context_case import INT64, LENGTH, WIDTH, Layer
from partc.compiler import nn
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.ir.graph import FOLDED
from partc.compiler.ir.programs import Comm
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.format import ORDER
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from partc.runtime.artifact.manifest import open_artifact
from partc.runtime.checker.across.orders import check_orders
from rows import of_today
from training_equivalence import same_training

WORDS = 18


class Flat(nn.Module):
    """A layer whose product and loss are of flat tokens, as exporters write them; `late`: with a sum along the flat tokens."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.tokens, self.layer = late, nn.Embedding(WORDS, WIDTH), Layer()
        self.wide, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, op, ids, labels):
        places = op.Range(0, op.Squeeze(op.Shape(ids, start=1, end=2)), 1)
        x = self.layer(op, self.tokens(op, ids), op.LessOrEqual(places, op.Unsqueeze(places, [1])))
        flat = self.wide(op, op.Reshape(x, op.Constant(value_ints=[-1, WIDTH])))
        if self.late:
            flat = op.Mul(op.CumSum(flat, op.Constant(value_int=0)), 0.1)
        shape = op.Concat(op.Shape(ids), op.Constant(value_ints=[WIDTH]), axis=0)
        logits = self.head(op, op.Add(x, op.Reshape(op.Tanh(flat), shape)))
        flat = op.Reshape(logits, op.Constant(value_ints=[-1, WORDS])), op.Reshape(labels, op.Constant(value_ints=[-1]))
        return op.SoftmaxCrossEntropyLoss(*flat, ignore_index=-1)


def flat(late: bool = False) -> Source:
    nn.seed(3)
    return Source(
        trace(Flat(late), [Spec(name, ("batch", "seq"), INT64) for name in ("ids", "labels")], ["loss"], "flat.py")
    )


def plan(mesh: str, ranks: int, how: str, more: str = "") -> str:
    return (
        f"ranks: {ranks}\nmesh: {{{mesh}}}\ncontext: {{axis: cp, {how}}}\n{more}"
        "symbols: {batch: {divisor: 2}, seq: {divisor: 24, max: 48}}\n"
        "train:\n  loss: loss\n  optimizer: {type: sgd, lr: 0.1}\n"
    )


def feeds() -> list[dict[str, np.ndarray]]:
    chance = np.random.default_rng(1)
    ids, labels = chance.integers(0, WORDS, (2, 4, LENGTH))
    return [{"ids": ids, "labels": np.where(chance.random(labels.shape) < 0.3, -1, labels)}]


RECORDS = "dataset: {ids: [dp, null], labels: [dp, null]}\n"


@pytest.mark.parametrize(
    ("mesh", "ranks", "how", "more"),
    [
        ("dp: 2, cp: 2", 4, "attention: ring, order: fold", RECORDS),
        *of_today(
            [
                ("cp: 2", 2, "attention: ring, order: fold", ""),
                ("cp: 4", 4, "attention: ring, order: fold", ""),
                ("cp: 3", 3, "attention: ring", ""),
                ("cp: 2, tp: 2", 4, "attention: ring, order: fold", "sharding: {wide: colwise, head: colwise}\n"),
            ],
            1,
        ),
    ],
)
def test_flat_tokens_are_sharded(mesh: str, ranks: int, how: str, more: str, tmp_path: Path) -> None:
    program = same_training(flat, plan(mesh, ranks, how, more), tmp_path, feeds(), rtol=1e-5, atol=1e-5)
    assert Counter(node.op_type for node in program.model.graph if node.domain == "partc.nn") == {
        "RingAttention": 1,
        "JoinTokens": 3,
        "SplitTokens": 1,
    }
    makers = [node for node in program.model.graph if node.op_type in ("JoinTokens", "Gemm", "ReduceMax")]
    assert all(out.meta[FOLDED] is None for node in makers for out in node.outputs)  # `verify` compares none of them
    sent = {step.op_type for part in program.parts for step in part.steps if isinstance(step, Comm)}
    assert sent == {"Exchange", "AllReduce"} | ({"AllGather", "ReduceScatter"} if "tp" in mesh else set())


def test_folded_tokens_go_through_stages_in_microbatches(tmp_path: Path) -> None:
    """The order of tokens is counted by sizes alone, so it is one for all microbatches."""
    stages = "placement: {tokens: {pp: 0}, head: {pp: 1}}\npipeline: {microbatches: 2, schedule: 1f1b}\n"
    text = plan("pp: 2, cp: 2", 4, "attention: ring, order: fold", stages)
    same_training(flat, text, tmp_path, feeds(), rtol=1e-5, atol=1e-5)


def test_flat_tokens_that_know_their_places_stay_as_they_are(tmp_path: Path) -> None:
    """The flat product is gathered in natural order; the loss is sharded."""
    program = same_training(
        partial(flat, True), plan("cp: 2", 2, "attention: ring"), tmp_path, feeds(), rtol=1e-5, atol=1e-5
    )
    assert Counter(node.op_type for node in program.model.graph)["JoinTokens"] == 2


REFUSED = [
    (True, "cp: 2", 2, "", "plan.yaml:3: 'CumSum' (CumSum) cannot run on folded tokens"),
    (False, "cp: 2", 2, "placement: {head: 1}\n", "plan.yaml:3: 'layer.MatMul_1.ring' has its tokens on 1 of the 2 ranks along 'cp'\n"
     "  it runs on rank 1 (follows its reader layer.Transpose_4), and needs one shard of the tokens on each\n"
     "  help: place it on ranks that have all of 'cp', or cut tokens by 'context' alone"),
]  # fmt: skip


@pytest.mark.parametrize(("late", "mesh", "ranks", "more", "message"), REFUSED, ids=range(len(REFUSED)))
def test_flat_tokens_that_no_rank_can_have_are_refused(
    late: bool, mesh: str, ranks: int, more: str, message: str, tmp_path: Path
) -> None:
    text = plan(mesh, ranks, "attention: ring, order: fold", more)
    with pytest.raises(CompileError) as error:
        compile_source(flat(late), parse_plan(text, "plan.yaml"), tmp_path / "build")
    assert message in str(error.value)


def test_labels_of_another_order_than_flat_tokens_are_told(tmp_path: Path) -> None:
    text = plan("cp: 2", 2, "attention: ring, order: fold")
    compile_source(flat(), parse_plan(text, "plan.yaml"), tmp_path / "build", check=False)
    artifact = open_artifact(tmp_path / "build")
    model = artifact.model(0)
    assert [*check_orders(artifact.manifest, {0: model})] == []
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    gather = next(node for node in changed.graph.node if "labels" in node.input and metadata_of(node, ORDER))
    for node in changed.graph.node:
        node.input[:] = ["labels" if name == gather.output[0] else name for name in node.input]
    facts = [one.fact for one in check_orders(artifact.manifest, {0: changed})]
    assert any("has tokens in" in fact for fact in facts)
