"""GPipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).

Total with F = B = W = 1 and one stage a rank: 3m + 3(p - 1), an overhead of (p - 1)/m. Every rank keeps m microbatches.
Any stages fit: those of one home run one after the other, each over all microbatches (breadth-first, arXiv 2211.05953).

    rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
    rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
"""

from __future__ import annotations

from partc.compiler.schedule.schedule import Schedule, scheduled
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def gpipe(stages: Stages, microbatches: int) -> Schedule:
    """All F in the order of the stages, then all B in the opposite one."""
    rows = []
    for home, own in enumerate(stages.on):
        forward = [Task(s, Kind.FORWARD, i) for s in own for i in range(microbatches)]
        backward = [Task(s, Kind.BACKWARD, i) for s in reversed(own) for i in range(microbatches)]
        rows.append((home, forward + backward))
    return scheduled("gpipe", stages, microbatches, rows)
