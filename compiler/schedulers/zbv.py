"""ZB-V: two stages a rank in a V, so that the first rank has the first stage and the last (Qi et al. 2023, arXiv 2401.10241).

Total with F = B = W = 1 a rank: 3m + (p - 1)/2 for m >= 2p - 1, half the overhead of ZB-H1, at the same p microbatches on every rank. Twice
the messages. F B W are tasks of the way there, f b w of the way back; the row of rank r of p is

    F x (2(p - r) - 1),  fF x r,  fbw x (p - r),  FBWfbw until the last F,  BWfbw until the last f,  Bb x r,  BW x (p - r),  w...,  W...

With fewer microbatches than 2p - 1 the row is that of 2p - 1 without the tasks of the others; the total is then
3m + max((p - 1)/2, 2p - 1 - m).

    rank 0: 0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 3F2 3B2 3W2 0B1 3F3 3B3 3W3 0B2 0B3
    rank 1: 1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3
"""

from __future__ import annotations

from partc.compiler.schedule.schedule import Schedule, scheduled
from partc.compiler.schedule.stages import Stages
from partc.runtime.artifact.tasks.task import Kind, Task


def zbv(stages: Stages, microbatches: int) -> Schedule:
    """The schedule of stages in a V."""
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
