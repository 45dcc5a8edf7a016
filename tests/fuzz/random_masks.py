"""Random dropouts in random networks, stages and plans: ranks draw the masks that one rank draws, however the batch is cut and divided.

    python tests/fuzz/random_masks.py --cases 300 --seed 1
    python tests/fuzz/random_masks.py --case 17 --seed 1       one, with its model and its plan

A case is one of `random_pipelines.py` with dropouts at any value and cuts of any node (`masked_networks.py`); half of them have
`accumulate`, or no microbatches at all, instead of stages, on one group or several; some of these take statistics of a cut batch. A third
have targets, as `random_targets.py` has them. The same is compared as there.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pool
from masked_networks import masked
from random_pipelines import SECONDS, Case, drawn, reason, worked
from random_targets import targeted


def with_masks(chance: random.Random) -> Case:
    """The case that chance says."""
    accumulate = chance.random() < 0.5
    case = drawn(chance, masked, [1, 1, 2, 3] if accumulate else None)
    if accumulate:
        count = 1 if case.statistics else case.count
        case = replace(case, accumulate=True, count=count, more="", rows=False)
    return targeted(chance, case) if chance.random() < 0.3 else case


def work(chance: random.Random, folder: Path) -> str:
    """Runs a case in both ways; gives why it is refused, or ''."""
    return worked(with_masks(chance), folder)


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=SECONDS, reason=reason)
