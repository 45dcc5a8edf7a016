"""Layers of experts in a search: ranks that share the batch share the experts, too, where that is faster or saves the memory that lacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from expert_layers import CHOICES, EXPERTS, INNER, WIDTH, model
from machines import links
from partc.compiler.cost.play import Begin, Finish
from partc.compiler.cost.step import simulated
from partc.compiler.errors import CompileError
from partc.compiler.frontend.onnx_file import from_proto
from partc.compiler.frontend.source import Source
from partc.compiler.pipeline import compile_source
from partc.compiler.plan.read import parse_plan
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.proposal.propose import propose
from partc.compiler.search.base_plan import Base, base_of
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from partc.runtime.artifact.manifest import open_artifact

TOKENS, LAYERS = 4800, 2


def source() -> Source:
    return Source(from_proto(model(LAYERS), Path("model.onnx")))


@pytest.fixture(scope="module")
def search() -> Search:
    on = links(1e-5, 1e9)
    return Search.of(source(), "model.onnx", Request(4, Fixed(dp=4), Base(), on, {"batch": TOKENS}))


def test_a_divisor_of_the_ranks_and_of_the_experts_shares_them(search: Search) -> None:
    assert {one.degrees.ep for one in search.candidates} == {1, 2, 4}
    matrices = LAYERS * EXPERTS * 2 * WIDTH * INNER * 4
    whole = search.estimate(Candidate(Degrees(dp=4)))
    for ep in (2, 4):
        saved = whole.bytes - search.estimate(Candidate(Degrees(dp=4, ep=ep))).bytes
        assert saved == pytest.approx(matrices * (1 - 1 / ep))


PACKED = """ranks: 4
mesh: {dp: 4}
experts: {axis: dp}
messages:
  gradients: {block: 64, keep_rest: true}
  rows: {block: 6}
train:
  loss: {type: mse, prediction: y, target: t}
  optimizer: {type: adam, lr: 0.1}
"""


def test_messages_in_eight_bits_are_taken_over_and_priced(tmp_path: Path) -> None:
    """Rows are said where they are sent; over a slow link times are those of the bytes: 1/4 + 1/64, and 1/4 + 1/6 of rows."""
    (tmp_path / "train.yaml").write_text(PACKED)
    base, model = base_of(tmp_path / "train.yaml", source())
    request = Request(4, Fixed(dp=4), base, links(1e-9, 1e7), {"batch": TOKENS})
    packed = Search.of(model, "model.onnx", request)
    exact = Search.of(model, "model.onnx", replace(request, base=replace(base, messages=None)))
    whole, shared = Candidate(Degrees(dp=4)), Candidate(Degrees(dp=4, ep=2))
    for candidate in (whole, shared, Candidate(Degrees(dp=4), stored=True, microbatches=2)):
        plan = parse_plan(packed.proposal(candidate).text, "plan.yaml")
        assert plan.messages is not None
        assert plan.messages.gradients is not None
        assert (plan.messages.rows is None) == (candidate == whole or candidate.stored)
        assert packed.estimate(candidate).bytes > exact.estimate(candidate).bytes
    ratio = packed.estimates.routed(shared) / exact.estimates.routed(shared)
    assert ratio == pytest.approx(1 / 4 + 1 / 6, rel=0.03)
    less = exact.estimates.after(whole, 1e6) - packed.estimates.after(whole, 1e6)
    assert less == pytest.approx(2 * 3 / 4 * 1e6 / 1e7 * (3 / 4 - 1 / 64), rel=0.01)


def test_a_capacity_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(PACKED.replace("{axis: dp}", "{axis: dp, capacity: 1.5}"))
    with pytest.raises(CompileError, match=r"train\.yaml:3: a search does not take a capacity of experts over"):
        base_of(tmp_path / "train.yaml", source())


@pytest.mark.parametrize("ep", [2, 4])
def test_the_bytes_and_the_time_of_routes_are_estimated(search: Search, ep: int, tmp_path: Path) -> None:
    """A plan sends what the formula says, in the time that its simulation takes for it, to a tenth."""
    candidate = Candidate(Degrees(dp=4, ep=ep))
    program = compile_source(source(), parse_plan(search.proposal(candidate).text, "plan.yaml"), tmp_path / "a").program
    played = simulated(open_artifact(tmp_path / "a"), search.request.machine, {"batch": TOKENS}).played
    took = sum(
        one.travel if isinstance(one, Begin) else one.seconds
        for one in played.classes[0].actions
        if isinstance(one, Begin | Finish) and one.op in ("Route", "Return")
    )
    routes = [event.bytes for event in program.events if event.op_type in ("Route", "Return")]
    received = CHOICES * WIDTH * 4 * (ep - 1) // ep
    assert routes == [f"{received // 4}*batch"] * 2 * LAYERS
    assert search.estimates.routed(candidate) == pytest.approx(took, rel=0.1)
    assert search.estimate(candidate).seconds > search.estimate(Candidate(Degrees(dp=4))).seconds


def test_experts_of_a_model_without_any_are_refused() -> None:
    from sharded_models import mlp

    with pytest.raises(CompileError, match="experts over 2 ranks: the model has no layer of experts"):
        propose(Source(from_proto(mlp(), Path("model.onnx"))), "model.onnx", Degrees(dp=2, ep=2))
