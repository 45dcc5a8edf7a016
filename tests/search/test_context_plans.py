"""A search with a context axis: all candidates have it, its messages take what is estimated, and the found plan equals the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from equivalence import same_as_whole
from machines import links
from partc.cli.simulation.search import Options, searched
from partc.compiler.cost.machine_file import machine_text
from partc.compiler.cost.play import Begin, Finish
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search.base_plan import Base
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from partc.compiler.search.search_state import play_program
from partc.runtime.errors import UsageError
from perceptrons import layers
from proposal_case import ids, source, transformer

SIZES = {"batch": 8, "seq": 48}


def test_keys_and_values_are_estimated_as_they_are_played() -> None:
    request = Request(4, Fixed(cp=2), Base(), links(1e-5, 1e8), SIZES)
    search = Search.of(source(transformer()), "model.onnx", request)
    assert {one.degrees.cp for one in search.candidates} == {2}
    assert {one.degrees.ranks for one in search.candidates} == {2, 4}
    candidate = Candidate(Degrees(dp=2, cp=2))
    played = play_program(search, search.proposal(candidate).done).played
    took = sum(
        one.travel if isinstance(one, Begin) else one.seconds
        for one in played.classes[0].actions
        if isinstance(one, Begin | Finish) and one.op == "AllGather"
    )
    assert search.estimates.attended(candidate) == pytest.approx(took, rel=0.1)


def test_the_found_plan_equals_the_model(tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text(machine_text(links(1e-7, 1e12)))
    proto, options = transformer(), Options(4, Fixed(cp=2), SIZES, machine=tmp_path / "machine.yaml")
    found = searched(source(proto), "model.onnx", options)
    assert "context: {axis: cp}" in found.text
    assert "  context alone" in found.report
    same_as_whole(proto, found.text, ids(8, 48), rtol=1e-4, atol=1e-4)


def test_what_no_context_can_be_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text(machine_text(links(1e-7, 1e12)))
    options = Options(4, Fixed(cp=2), {"batch": 64}, machine=tmp_path / "machine.yaml")
    with pytest.raises(UsageError, match="the compiler refuses every candidate: no attention is recognized"):
        searched(source(layers()), "model.onnx", options)
    with pytest.raises(UsageError, match="--ranks 6 is not divisible by the 4 ranks of --context 4"):
        searched(source(layers()), "model.onnx", Options(6, Fixed(cp=4), {"batch": 64}))
