"""One microbatch after another: F of all stages, then B of all, and only then the next microbatch.

Any stages fit, and every home keeps one microbatch, the least that there is. Homes wait for each other: with several stages a home works
only while no other one does. It is the order of gradients that are accumulated.

    rank 0: 0F0         0B0 0F1         0B1
    rank 1:     1F0 1B0         1F1 1B1
"""

from __future__ import annotations

from partc.compiler.schedule.schedule import Schedule, scheduled
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def in_turn(stages: Stages, microbatches: int) -> Schedule:
    """F in the order of the stages and B in the opposite one, for each microbatch."""
    rows = []
    for home, own in enumerate(stages.on):
        row = []
        for i in range(microbatches):
            row += [Task(s, Kind.FORWARD, i) for s in own]
            row += [Task(s, Kind.BACKWARD, i) for s in reversed(own)]
        rows.append((home, row))
    return scheduled("in turn", stages, microbatches, rows)
