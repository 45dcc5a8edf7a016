"""The rows of a schedule with what its tasks take at least, against its simulation; and a bound that is near where rows are what waits."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from late import late, trained
from partc.cli.simulation.leasts import Leasts
from partc.cli.simulation.plays import play_program
from partc.cli.simulation.rows import Times, ends_of
from partc.compiler.proposal.degrees import Degrees
from partc.compiler.schedule.costs import Costs, StageCost
from partc.compiler.schedule.simulate import simulate
from partc.compiler.schedule.stages import chain
from partc.compiler.schedulers.choose import NAMED
from partc.compiler.search.candidate import SCHEDULES, Candidate


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
@pytest.mark.parametrize("microbatches", [2, 5, 8])
def test_rows_end_as_they_are_simulated(schedule: str, each: int, microbatches: int) -> None:
    """Random times of four stages or more; what follows a message is all of a task, or a part of it."""
    chance = random.Random(microbatches)
    one = Candidate(Degrees(stages=4), microbatches, schedule, stages_each=each)
    count = one.stages
    forward, backward, weight, message = ([chance.uniform(1, 9) for _ in range(count)] for _ in range(4))
    if schedule not in ("zb_h1", "zbv"):
        weight = [0.0] * count
    weight[0] = 0.0  # its backward pass is not split
    made = NAMED[schedule].make(chain(one.homes), microbatches)
    costs = Costs(
        tuple(StageCost(*some) for some in zip(forward, backward, weight, strict=True)),
        messages={(k, k + 1): seconds for k, seconds in enumerate(message[:-1])},
    )
    spans = simulate(made, costs).spans
    last = [max(end for task, (_, end) in spans.items() if task.stage == stage) for stage in range(count)]
    all, part = (
        ends_of(schedule, one.homes, microbatches, Times(*map(np.array, (forward, backward, behind, weight, message))))
        for behind in (backward, [0.5 * seconds for seconds in backward])
    )
    assert all == pytest.approx(last)
    assert (part <= all + 1e-9).all()
    assert part.max() < all.max()


@pytest.mark.parametrize(("schedule", "each"), SCHEDULES)
def test_a_schedule_whose_ranks_wait_is_near_its_bound(schedule: str, each: int, tmp_path: Path) -> None:
    """Few microbatches, and links over which a message takes longer than a task: what ranks wait is most of a step."""
    search = trained(tmp_path, 4, late(1e-6, 1e-4), 8)
    least = Leasts(search, play_program(search, search.proposal(Candidate(Degrees())).done))
    one = Candidate(Degrees(stages=4), 4, schedule, stages_each=each)
    assert one in search.candidates
    played = play_program(search, search.proposal(one).done).played.seconds
    assert max(1.3 * least.quick(one), 0.7 * played) < least(one) <= played
