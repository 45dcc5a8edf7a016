"""1F1B: a stage first runs one forward pass for each stage after it, then alternates one backward, one forward (PipeDream-Flush, arXiv
2006.09503).

Total with F = B = W = 1: 3m + 3(p - 1) as GPipe, but rank r of p keeps only min(m, p - r) microbatches. The stages may form any graph
(skips, two towers): a stage's height, the most edges on a way to a last stage, takes the place of p - 1 - r. A stage's height is above that
of all that read from it, which is why no two rows wait for each other.

    rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""

from __future__ import annotations

from partc.compiler.schedule.schedule import Schedule, scheduled
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def one_f_one_b(stages: Stages, microbatches: int) -> Schedule:
    """The schedule of stages that have a home each."""
    rows = []
    for s, (home,) in enumerate(stages.stage_ranks):
        ahead = min(microbatches, stages.heights[s] + 1)
        row = [Task(s, Kind.FORWARD, i) for i in range(ahead)]
        for i in range(microbatches):
            row.append(Task(s, Kind.BACKWARD, i))
            if ahead + i < microbatches:
                row.append(Task(s, Kind.FORWARD, ahead + i))
        rows.append((home, row))
    return scheduled("1f1b", stages, microbatches, rows)
