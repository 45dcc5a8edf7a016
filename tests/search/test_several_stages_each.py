"""Groups of ranks that have several stages each: when their schedules win, and that a found plan of them trains alike."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from machines import links
from partc.compiler.cost.machine import Machine
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search.base_plan import base_of
from partc.compiler.search.candidate import Candidate, Fixed
from partc.compiler.search.search import Request, Search
from partc.compiler.search.search_state import play_program, played
from perceptrons import TRAIN, layers
from proposal_case import source
from training_equivalence import same_training

FAST, SLOW = links(1e-7, 1e12), links(3e-3, 1e8)
IN_LINE = Candidate(Degrees(stages=4), 4, "1f1b")
LOOP = Candidate(Degrees(stages=4), 4, "interleaved", stages_each=2)
VEE = Candidate(Degrees(stages=4), 4, "zbv", stages_each=2)
RECORDS = 8


def search_on(machine: Machine, folder: Path, ranks: int = 4, depth: int = 8, **fixed: int) -> Search:
    """A search of how perceptrons are trained on few records."""
    (folder / "train.yaml").write_text(TRAIN.replace("batch: 64", f"batch: {RECORDS}"))
    base, model = base_of(folder / "train.yaml", source(layers(24, depth)))
    return Search.of(model, "model.onnx", Request(ranks, Fixed(**fixed), base, machine, {}))


def seconds(search: Search, one: Candidate) -> float:
    return play_program(search, search.proposal(one).done).played.seconds


@pytest.mark.parametrize(("machine", "wins"), [(FAST, True), (SLOW, False)], ids=["fast links", "slow links"])
def test_interleaving_wins_where_links_are_fast(machine: Machine, wins: bool, tmp_path: Path) -> None:
    """Of few microbatches and many blocks; the estimates say so, too."""
    search = search_on(machine, tmp_path)
    assert {IN_LINE, LOOP, VEE} < {*search.candidates}
    for one in (LOOP, VEE):
        assert (seconds(search, one) < seconds(search, IN_LINE)) == wins
        assert (search.estimate(one).seconds < search.estimate(IN_LINE).seconds) == wins


@pytest.mark.parametrize("one", [LOOP, VEE], ids=str)
def test_the_stages_of_a_group_are_written(one: Candidate, tmp_path: Path) -> None:
    """In a loop, or there and back; each says its share, and the compiler takes them as they are."""
    search = search_on(FAST, tmp_path)
    done = search.proposal(one).done
    assert done.plan.pipeline is not None
    assert [stage.ranks for stage in done.plan.pipeline.stages] == [(home,) for home in one.stage_groups]
    assert search.proposal(one).text.count("% of the cost") == one.stages == 8
    assert str(one).startswith("8 stages on 4 groups, 4 microbatches, ")


def test_a_found_plan_of_several_stages_each_trains_alike(tmp_path: Path) -> None:
    """The search takes one where it is the fastest, says what it saves, and the plan trains as the unsharded model does."""
    search = search_on(FAST, tmp_path, tp=1, dp=1, stages=2)
    best = played(search, None, time.monotonic(), None).best
    assert best is not None
    assert best.candidate.stages_each > 1
    batch = np.random.default_rng(5).standard_normal
    steps = [{"x": batch((RECORDS, 24), np.float32), "label": batch((RECORDS, 6), np.float32)} for _ in range(2)]
    text = best.with_head(())
    same_training(lambda: source(layers(24, 8)), text, tmp_path / "run", steps, rtol=1e-4, atol=1e-3)


def test_each_group_has_as_many_stages_as_there_are_modules(tmp_path: Path) -> None:
    """Seven modules with weights make two stages on each of two groups, and not four, nor two on each of four."""
    search = search_on(FAST, tmp_path, depth=3, tp=1, dp=1)
    each = {(one.degrees.stages, one.stages_each) for one in search.candidates}
    assert each == {(1, 1), (2, 1), (2, 2), (4, 1)}
