"""A pipeline's artifact played action by action takes what its schedule takes, played task by task with the same times."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from machines import curve, machine
from partc.cli.output.pipeline import pipeline_of
from partc.cli.simulation.step import simulated
from partc.compiler.cost.machine import Link, Machine
from partc.compiler.cost.play import Compute
from partc.compiler.schedule.costs import unit_costs, with_times
from partc.compiler.schedule.simulate import simulate
from sample_plans import compiled


@pytest.mark.parametrize("plan", ["lenet/train_pipeline", "gpt/train_pipeline"])
def test_a_step_takes_what_its_schedule_takes(plan: str, tmp_path: Path) -> None:
    artifact = compiled(plan, tmp_path / "build")
    none = curve(1e18)
    fast = Machine("", 0, machine().processors, [Link("default", 2, 1, 1.0, 0.0, none, none)])
    found = simulated(artifact, fast, {"seq": 64} if plan.startswith("gpt") else {})
    times: dict[str, float] = defaultdict(float)
    begins, ends = [], []
    for some in found.played.intervals:
        for one in some:
            if isinstance(one.action, Compute) and one.action.task:
                times[one.action.task] += one.end - one.begin
                begins.append(one.begin)
                ends.append(one.end)
    pipeline = pipeline_of(artifact)
    assert pipeline is not None
    schedule = pipeline.schedule
    assert {*times} == {str(task) for row in schedule.rows for task in row}
    timing = simulate(schedule, with_times(unit_costs(schedule.stages), times))
    assert max(ends) - min(begins) == pytest.approx(timing.total, rel=1e-3)
