"""ZB-H1: 1F1B whose W wait, so that B comes earlier and W fill the end (Qi et al. 2023, arXiv 2401.10241).

Total: (p - 1)(F + B - W) above the ideal, 3m + p - 1 with F = B = W = 1. With one stage a rank and a common begin of steps no schedule is
faster, since the last rank waits for p - 1 forward passes. Every rank keeps at most p microbatches, those that wait for W included.
Rank r delays W by r microbatches. The first stage sends no cotangent, so its backward pass stays whole. The stages may form any graph if
each has a home of its own; then the greatest height less the stage's takes the place of r.

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1: 1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
    rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
"""

from __future__ import annotations

from partc.compiler.schedule.schedule import Schedule, scheduled
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def zb_h1(stages: Stages, microbatches: int) -> Schedule:
    """The schedule of stages that have a home each."""
    top, rows = max(stages.heights), []
    for s, (home,) in enumerate(stages.stage_ranks):
        ahead, delay = min(microbatches, stages.heights[s]), top - stages.heights[s]
        row = [Task(s, Kind.FORWARD, i) for i in range(ahead)]
        for i in range(microbatches):
            if ahead + i < microbatches:
                row.append(Task(s, Kind.FORWARD, ahead + i))
            row.append(Task(s, Kind.BACKWARD, i))
            if i >= delay:
                row.append(Task(s, Kind.WEIGHT, i - delay))
        row += [Task(s, Kind.WEIGHT, i) for i in range(max(0, microbatches - delay), microbatches)]
        rows.append((home, row))
    return scheduled("zb_h1", stages, microbatches, rows)
