"""A sequence that is cut over ranks: each way of attention trains as one rank does, and sends what its formula says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from context_case import DEPTH, LENGTH, TRAIN, Windowed, decoder, feeds, received, units
from mutated import change_file, texts
from partc.compiler import nn
from partc.compiler.errors import CompileError
from partc.compiler.frontend.inputs import Spec
from partc.compiler.frontend.source import Source
from partc.compiler.frontend.trace import trace
from partc.compiler.lower import ring
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.runtime.artifact.format import HOP, PHASE
from partc.runtime.artifact.graph.onnx_graph import metadata_of
from rows import of_today
from training_equivalence import run, run_whole, same_tensors, same_training, train_whole


class Learned(nn.Module):
    """Attention whose mask is made of tokens by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.bias = nn.Linear(8, 8), nn.Linear(8, LENGTH)

    def forward(self, op, x):
        one = op.Constant(value_ints=[1])
        q, mask = op.Unsqueeze(self.q(op, x), one), op.Unsqueeze(self.bias(op, x), one)
        shares = op.Softmax(op.Add(op.MatMul(q, op.Transpose(q, perm=[0, 1, 3, 2])), mask), axis=-1)
        return op.Squeeze(op.MatMul(shares, q), one)


def plan(ranks: int, attention: str, more: str = "", mesh: str = "") -> str:
    return (
        f"ranks: {ranks}\nmesh: {{{mesh or f'cp: {ranks}'}}}\ncontext: {{axis: cp, attention: {attention}{more}}}\n"
        f"symbols: {{batch: {{divisor: 2}}, seq: {{divisor: 12, max: 48}}}}\n{TRAIN}"
    )


CASES = [
    (2, "heads", False),
    (3, "heads", False),
    (4, "gather", True),
    (6, "heads", False),
    (3, "ring", False),
    (4, "ring", True),
]
"""Heads by each formula of their keys; rings in chunks and not. Rings of two ranks are those of a window and of folded tokens."""


@pytest.mark.parametrize(("ranks", "way", "causal"), of_today(CASES, 2))
def test_a_cut_sequence_trains_as_a_whole_one(
    ranks: int, way: str, causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ring of three ranks queries are computed in chunks."""
    monkeypatch.setattr(ring, "CHUNK", 4 if ranks < 4 else 128)
    text = plan(ranks, way)
    program = same_training(partial(decoder, causal), text, tmp_path, feeds(causal), rtol=1e-5, atol=1e-5)
    assert not [event.bytes for event in program.events if "seq**2" in event.bytes]
    assert received(program) == units(way, ranks, causal) * 2 * LENGTH * DEPTH * 4


@pytest.mark.parametrize(("ranks", "causal", "kind"), [(3, False, "float16"), (2, True, "bfloat16")])
def test_a_ring_of_16_bits_sends_half_the_bytes_and_is_as_exact_as_one_rank(
    ranks: int, causal: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off float32, that is, no further than one rank that rounds scores and shares too."""
    monkeypatch.setattr(ring, "CHUNK", 4)
    rounded = f"precision: {{compute: {kind}}}\n"
    have = run(decoder(causal), rounded + plan(ranks, "ring"), tmp_path, feeds(causal))
    want, whole = (run_whole(decoder(causal), f"ranks: 1\n{one}{TRAIN}", feeds(causal)) for one in (rounded, ""))
    assert texts(tmp_path) == ""
    assert received(have.program) == units("ring", ranks, causal) * 2 * LENGTH * DEPTH * 2
    ring_off, rank_off = (
        max(float(np.abs(one.after[name] - whole.after[name]).max()) for name in whole.after) for one in (have, want)
    )
    assert 0 < ring_off < 2 * rank_off


@pytest.mark.parametrize(("way", "mesh"), of_today([("gather", "dp: 2, cp: 2"), ("heads", "cp: 2, tp: 2")], 1))
def test_a_cut_sequence_goes_with_other_axes(way: str, mesh: str, tmp_path: Path) -> None:
    more = "dataset: {ids: [dp, null], keep: [dp, null], labels: [dp, null]}\n"
    styles = 'sharding: {"layers.*.{q,k,v}": colwise, "layers.*.out": rowwise}\n'
    text = plan(4, way, mesh=mesh).replace("\ntrain:", (more if "dp" in mesh else styles) + "train:")
    same_training(decoder, text, tmp_path, feeds(), rtol=1e-5, atol=1e-5)


def mistaken(model: onnx.ModelProto, phase: str, hops: tuple[int, int]) -> None:
    """Has the hops of a rank's keys read each other's blocks."""
    nodes = {
        metadata_of(node, HOP): node
        for node in model.graph.node
        if metadata_of(node, PHASE) == phase and metadata_of(node, HOP).startswith("k ")
    }
    one, two = (nodes[f"k {hop} causal"] for hop in hops)
    one.input[0], two.input[0] = two.input[0], one.input[0]


def test_a_wrong_order_of_hops_is_told(tmp_path: Path) -> None:
    compile_source(decoder(True), parse_plan(plan(3, "ring"), "plan.yaml"), tmp_path / "build", check=False)
    change_file(tmp_path / "build", "rank_0002.onnx", lambda model: mistaken(model, "", (1, 2)))
    assert "hop 2 passes as many as its number" in texts(tmp_path / "build")


def test_a_stale_block_is_told_and_trains_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass of all hops with the keys of the first one."""
    passed = ring._Ring.passed
    monkeypatch.setattr(
        ring._Ring,
        "passed",
        lambda self, k, block, hop, cause: block if k == 1 and "grad" in cause else passed(self, k, block, hop, cause),
    )
    have = run(decoder(True), plan(2, "ring"), tmp_path / "build", feeds(True), check=False)
    want = run_whole(decoder(True), train_whole(plan(2, "ring")), feeds(True))
    with pytest.raises(AssertionError):
        same_tensors(have.after, want.after, want.before, 1e-5)
    assert "which no message brings" in texts(tmp_path / "build")


def test_auto_takes_the_fewest_bytes_within_memory(tmp_path: Path) -> None:
    def way(more: str, ranks: int = 2) -> list[str]:
        source = decoder()
        found = compile_source(
            source, parse_plan(plan(ranks, "auto", more), "plan.yaml"), tmp_path / "build", check=False
        )
        return [one for one in found.program.warnings if "attention" in one]

    # (2 * 12 + 2 * 2) / 4 * 16 * 2 of heads are more than 2 * 2 / 2 * 16 * 2
    assert way(", memory: 300KB", 4)[0].startswith("plan.yaml:3: 1 attention by ring")
    assert way("") == [
        "plan.yaml:3: 1 attention by gather (gather 64*batch*seq bytes, heads 224*batch*seq bytes, ring 128*batch*seq bytes)"
    ]


REFUSED = [
    (plan(4, "heads").replace("divisor: 12", "divisor: 6"), "plan.yaml:3: 'cp' has 4 ranks, and 'ids' dim 1 has seq tokens\n"
     "  seq is a multiple of 6, not always of 4; nothing is padded\n  help: declare `seq: {divisor: 12}` under symbols"),
    (plan(8, "heads").replace("divisor: 12", "divisor: 8"), "12 heads over 8 ranks\n  each rank has whole heads"),
    (plan(2, "gather", ", memory: 1KB"), "'gather' of 'layers.0.MatMul_1' keeps"),
    (plan(2, "gather", mesh="tp: 2"), "'cp' is not an axis of the mesh\n  the mesh is tp=2\n  help: write axis: tp"),
    (plan(2, "gather") + "dataset: {ids: [null, cp]}", "dataset of 'ids' cuts the tokens itself"),
    (plan(2, "gather") + "dataset: {ids: [cp, null]}", "plan.yaml:3: 'cp' cuts 'ids' dim 0 already\n  'context' cuts dim 1, the tokens"),
    (plan(2, "gather").replace(", seq: {divisor: 12, max: 48}", "") + "inputs: {ids: [batch, 9], keep: [batch, 9], labels: [batch, 9]}",
     "9 is not divisible by 2\n  help: take 8 or 10 tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        compile_source(decoder(), parse_plan(text, "plan.yaml"), tmp_path / "build")
    assert message in str(error.value)


def test_a_mask_that_learns_has_no_ring(tmp_path: Path) -> None:
    source = Source(trace(Learned(), [Spec("x", ("batch", LENGTH, 8), ir.DataType.FLOAT)], ["y"], "learned.py"))
    text = f"ranks: 2\nmesh: {{cp: 2}}\ncontext: {{axis: cp, attention: ring}}\n{TRAIN}".replace(
        "{type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}",
        "{type: mse, prediction: y, target: labels}",
    )
    with pytest.raises(CompileError, match="has no ring"):
        compile_source(source, parse_plan(text, "plan.yaml"), tmp_path / "build")


@pytest.mark.parametrize("window", [5.0, 4096.0])
def test_a_window_is_not_taken_for_a_causal_mask(window: float, tmp_path: Path) -> None:
    def source() -> Source:
        nn.seed(2)
        return Source(trace(Windowed(window), [Spec("x", ("batch", "seq", 8), ir.DataType.FLOAT)], ["y"], "window.py"))

    text = plan(2, "ring").replace(
        "{type: softmax_cross_entropy, logits: logits, labels: labels, axis: 2}",
        "{type: mse, prediction: y, target: labels}",
    )
    chance = np.random.default_rng(1)
    x, labels = chance.standard_normal((2, 2, LENGTH, 8)).astype(np.float32)
    program = same_training(source, text, tmp_path, [{"x": x, "labels": labels}], rtol=1e-5, atol=1e-5)
    (node,) = [node for node in program.model.graph if node.op_type == "RingAttention"]
    assert node.attributes.get_int("causal", 1) == 0
