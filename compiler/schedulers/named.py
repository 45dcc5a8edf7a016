"""The schedules that have a name and a closed form: with m microbatches, p ranks, v stages a rank, and the times F, B and W of tasks.

A schedule gives each rank, or group of ranks, the order of its tasks; the rows in docstrings are examples.
"""

from __future__ import annotations

import itertools

from partc.compiler.schedule.schedule import Schedule, scheduled
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def in_turn(stages: Stages, microbatches: int) -> Schedule:
    """One microbatch after another: F of all stages, then B of all, and only then the next microbatch.

    Any stages fit, and every home keeps one microbatch, the least that there is. Homes wait for each other: with several stages a home
    works only while no other one does. It is the order of gradients that are accumulated.

        rank 0: 0F0         0B0 0F1         0B1
        rank 1:     1F0 1B0         1F1 1B1
    """
    rows = []
    for home, own in enumerate(stages.on):
        row = []
        for i in range(microbatches):
            row += [Task(s, Kind.FORWARD, i) for s in own]
            row += [Task(s, Kind.BACKWARD, i) for s in reversed(own)]
        rows.append((home, row))
    return scheduled("in turn", stages, microbatches, rows)


def gpipe(stages: Stages, microbatches: int) -> Schedule:
    """GPipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).

    Total with F = B = W = 1 and one stage a rank: 3m + 3(p - 1), an overhead of (p - 1)/m. Every rank keeps m microbatches.
    Any stages fit: those of one home run one after the other, each over all microbatches (breadth-first, arXiv 2211.05953).

        rank 0: 0F0 0F1 0F2 0B0 0B1 0B2
        rank 1: 1F0 1F1 1F2 1B0 1B1 1B2
    """
    rows = []
    for home, own in enumerate(stages.on):
        forward = [Task(s, Kind.FORWARD, i) for s in own for i in range(microbatches)]
        backward = [Task(s, Kind.BACKWARD, i) for s in reversed(own) for i in range(microbatches)]
        rows.append((home, forward + backward))
    return scheduled("gpipe", stages, microbatches, rows)


def one_f_one_b(stages: Stages, microbatches: int) -> Schedule:
    """1F1B: a stage first runs one forward pass for each stage after it, then alternates one backward, one forward (PipeDream-Flush, arXiv
    2006.09503).

    Total with F = B = W = 1: 3m + 3(p - 1) as GPipe, but rank r of p keeps only min(m, p - r) microbatches. The stages may form any graph
    (skips, two towers): a stage's height, the most edges on a way to a last stage, takes the place of p - 1 - r. A stage's height is above
    that of all that read from it, which is why no two rows wait for each other.

        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
    """
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


def interleaved(stages: Stages, microbatches: int) -> Schedule:
    """Interleaved 1F1B: every rank has v stages, a loop apart, so the pipe fills v times faster (Narayanan et al. 2021, arXiv 2104.04473).

    Total with F = B = W = 1 a rank: 3m + 3(p - 1)/v for every m >= p, with v times the messages. Microbatches pass in max(1, m // p) rounds
    of nearly equal size, at least p in each where m >= p; so m need not be a multiple of p. With g microbatches in the largest round, rank
    r runs (v - 1) g + 2(p - 1 - r) forward passes ahead and keeps min(m, ((v - 1) g + 2(p - 1 - r) + 1) / v) microbatches.

        rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """
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


def zb_h1(stages: Stages, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose W wait, so that B comes earlier and W fill the end (Qi et al. 2023, arXiv 2401.10241).

    Total: (p - 1)(F + B - W) above the ideal, 3m + p - 1 with F = B = W = 1. With one stage a rank and a common begin of steps no schedule
    is faster, since the last rank waits for p - 1 forward passes. Every rank keeps at most p microbatches, those that wait for W included.
    Rank r delays W by r microbatches. The first stage sends no cotangent, so its backward pass stays whole. The stages may form any graph
    if each has a home of its own; then the greatest height less the stage's takes the place of r.

        rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        rank 1: 1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
    """
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


def zbv(stages: Stages, microbatches: int) -> Schedule:
    """ZB-V: two stages a rank in a V, so that the first rank has the first stage and the last (Qi et al. 2023, arXiv 2401.10241).

    Total with F = B = W = 1 a rank: 3m + (p - 1)/2 for m >= 2p - 1, half the overhead of ZB-H1, at the same p microbatches on every rank.
    Twice the messages. F B W are tasks of the way there, f b w of the way back; the row of rank r of p is

        F x (2(p - r) - 1),  fF x r,  fbw x (p - r),  FBWfbw until the last F,  BWfbw until the last f,  Bb x r,  BW x (p - r),  w...,  W...

    With fewer microbatches than 2p - 1 the row is that of 2p - 1 without the tasks of the others; the total is then
    3m + max((p - 1)/2, 2p - 1 - m).

        rank 0: 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 3F2 3B2 3W2 0B1 3F3 3B3 3W3 0B2 0B3
        rank 1: 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3
    """
    ranks = len(stages) // 2
    rows = []
    for r in range(ranks):
        count = dict.fromkeys("FBWfbw", 0)
        row = []
        for letter in _letters(ranks, r, max(microbatches, 2 * ranks - 1)):
            row.append(Task(r if letter.isupper() else 2 * ranks - 1 - r, Kind(letter.upper()), count[letter]))
            count[letter] += 1
        rows.append((stages.stage_ranks[r][0], [task for task in row if task.microbatch < microbatches]))
    return scheduled("zbv", stages, microbatches, rows)


def _letters(ranks: int, r: int, microbatches: int) -> str:
    """A row's letters for at least 2p - 1 microbatches."""
    warmup = "F" * (2 * (ranks - r) - 1) + "fF" * r + "fbw" * (ranks - r)
    turns = microbatches - warmup.count("F")
    steady = "FBWfbw" * turns + "BWfbw" * (microbatches - warmup.count("f") - turns)
    text = warmup + steady + "Bb" * r + "BW" * (ranks - r)
    return text + "w" * (microbatches - text.count("w")) + "W" * (microbatches - text.count("W"))
