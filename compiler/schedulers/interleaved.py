"""Interleaved 1F1B: every rank has v stages, a loop apart, so that the pipe fills v times faster (Narayanan et al. 2021, arXiv 2104.04473).

Total with F = B = W = 1 a rank: 3m + 3(p - 1)/v for every m >= p, with v times the messages. Microbatches pass in max(1, m // p) rounds of
nearly equal size, at least p in each where m >= p; so m need not be a multiple of p. With g microbatches in the largest round, rank r
runs (v - 1) g + 2(p - 1 - r) forward passes ahead and keeps min(m, ((v - 1) g + 2(p - 1 - r) + 1) / v) microbatches.

    rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""

from __future__ import annotations

import itertools

from partc.compiler.schedule.schedule import Schedule, scheduled
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def interleaved(stages: Stages, microbatches: int) -> Schedule:
    """The schedule of stages in a loop."""
    turns = stages.turns
    ranks = len(stages) // turns
    rounds = equal_rounds(microbatches, ranks)
    way = [(turn, i) for some in rounds for turn in range(turns) for i in some]
    rows = []
    for r in range(ranks):
        forward = [Task(turn * ranks + r, Kind.FORWARD, i) for turn, i in way]
        backward = [Task((turns - 1 - turn) * ranks + r, Kind.BACKWARD, i) for turn, i in way]
        ahead = min(len(way), (turns - 1) * max(map(len, rounds)) + 2 * (ranks - 1 - r))
        row = forward[:ahead]
        for k, task in enumerate(backward):
            row += [*forward[ahead + k : ahead + k + 1], task]
        rows.append((stages.stage_ranks[r][0], row))
    return scheduled("interleaved", stages, microbatches, rows)


def equal_rounds(microbatches: int, ranks: int) -> list[range]:
    """The microbatches of each round: at least p in each, unless there are fewer, and larger rounds last."""
    count = max(1, microbatches // ranks)
    ends = [microbatches * k // count for k in range(count + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]
