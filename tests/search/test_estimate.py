"""Estimates of candidates against what is played of them: with sums of layers, stages, and ranks that share cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from machines import links
from partc.compiler.cost.machine import Machine
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search.base_plan import base_of
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from partc.compiler.search.search_state import play_program
from perceptrons import TRAIN, layers
from proposal_case import source

LATE = links(2e-5, 1e9, 1e11)
"""A machine on which sessions and messages are most of a step."""
LATE = replace(LATE, processors={"cpu": replace(LATE.processors["cpu"], session=1e-4)})


def ratios(on: Machine, folder: Path, *some: Candidate) -> list[float]:
    """What is estimated of candidates of 4 ranks for what is played, as a search knows it that has played the unsharded model."""
    (folder / "train.yaml").write_text(TRAIN)
    base, model = base_of(folder / "train.yaml", source(layers(48, 4)))
    search = Search.of(model, "model.onnx", Request(4, Fixed(), base, on, {}))
    step = play_program(search, search.proposal(Candidate(Degrees())).done)
    search.estimates.calibrate(step.played.busy[0])
    played = [play_program(search, search.proposal(one).done).played.seconds for one in some]
    return [search.estimate(one).seconds / seconds for one, seconds in zip(some, played, strict=True)]


def test_sessions_of_layers_that_are_shared_and_of_stages_count(tmp_path: Path) -> None:
    """Where sessions and messages are most of a step no estimate is far below it."""
    some = [
        Candidate(Degrees(tp=4), 4),
        Candidate(Degrees(stages=4), 4, "1f1b"),
        Candidate(Degrees(stages=4), 4, "zb_h1"),
        Candidate(Degrees(tp=2, stages=2), 4, "1f1b"),
    ]
    assert all(0.7 < ratio < 1.3 for ratio in ratios(LATE, tmp_path, *some))


def test_gathers_of_stored_parameters_count(tmp_path: Path) -> None:
    some = [
        Candidate(Degrees(dp=4), stored=True),
        Candidate(Degrees(dp=4), 2, stored=True),
        Candidate(Degrees(dp=2, stages=2), 4, "1f1b", stored=True),
    ]
    assert all(0.6 < ratio < 1.3 for ratio in ratios(LATE, tmp_path, *some)), ratios(LATE, tmp_path, *some)


def test_a_rank_that_waits_leaves_its_core_to_others(tmp_path: Path) -> None:
    """Of four stages and one microbatch one rank computes at a time, on one core as on four."""
    for cores in (0, 1):
        (ratio,) = ratios(replace(links(1e-7, 1e12), cores=cores), tmp_path, Candidate(Degrees(stages=4)))
        assert ratio == pytest.approx(1, rel=0.3)
