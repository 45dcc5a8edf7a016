"""Random legal orders of the lanes of random programs with targets: whatever a fast or a slow device may do, ranks learn the same.

    python tests/fuzz/random_lanes.py --cases 100 --seed 1
    python tests/fuzz/random_lanes.py --case 17 --seed 1

A case is one of `random_targets.py`. Its lanes run one action after the other, not at the same time; the lane is drawn among those whose
next action need not wait.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pool
from partc.runtime.execution.targets.workers import LanePlan, Workers
from random_pipelines import SECONDS, reason, worked
from random_targets import with_targets


def work(chance: random.Random, folder: Path) -> str:
    """Runs a case in both ways; gives why it is refused, or ''."""
    case = with_targets(chance)

    def run(self: Workers, plan: LanePlan, actions: list[Any], *_: object) -> None:
        done = [0] * len(plan.lanes)
        while left := [lane for lane, places in enumerate(plan.lanes) if done[lane] < len(places)]:
            waits = {lane: plan.waits[plan.lanes[lane][done[lane]]] for lane in left}
            ready = [lane for lane in left if all(done[other] >= count for other, count in waits[lane])]
            lane = chance.choice(ready)
            actions[plan.lanes[lane][done[lane]]][1]()
            done[lane] += 1

    with mock.patch.object(Workers, "run", run):
        return worked(case, folder)


if __name__ == "__main__":
    pool.main(work, (__doc__ or "").partition("\n")[0], seconds=SECONDS, reason=reason)
