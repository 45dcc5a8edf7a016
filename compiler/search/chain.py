"""Chooses the best sharding of each block of a chain by a shortest path; with a memory limit, over memory in discrete steps.

    seconds[k][a]       of block k in its way a           memory[k][a]     the bytes that it keeps then
    between[k][a, b]    of block k in way a before block k + 1 in way b; infinite where b cannot follow

Without a limit `shortest` is exact. `within` rounds the memory of each block up to a step of the limit: what it finds is within the limit,
and nothing that is within the limit by as many steps as there are blocks is faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Table: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"
STEPS = 2048


@dataclass(frozen=True)
class Chain:
    """Blocks in a row, each with the ways in which it can be sharded."""

    seconds: Sequence[Table]
    memory: Sequence[Table]
    between: Sequence[Table]

    def cost(self, chosen: Sequence[int]) -> tuple[float, float]:
        """Seconds and bytes of a way for each block."""
        total = sum(table[way] for table, way in zip(self.seconds, chosen, strict=True))
        total += sum(table[pair] for table, pair in zip(self.between, itertools.pairwise(chosen), strict=True))
        return float(total), float(sum(table[way] for table, way in zip(self.memory, chosen, strict=True)))


def shortest(chain: Chain) -> tuple[int, ...]:
    """The fastest ways, whatever they keep."""
    best, came = chain.seconds[0], []
    for between, seconds in zip(chain.between, chain.seconds[1:], strict=True):
        ways = best[:, None] + between
        came.append(ways.argmin(axis=0))
        best = ways.min(axis=0) + seconds
    chosen = [int(best.argmin())]
    for step in reversed(came):
        chosen.append(int(step[chosen[-1]]))
    return tuple(reversed(chosen))


def within(chain: Chain, limit: float, steps: int = STEPS) -> tuple[int, ...] | None:
    """The fastest ways that keep no more than the limit, counted in steps; None where there are none."""
    sizes = [np.ceil(one / limit * steps - 1e-9).astype(int) for one in chain.memory]
    best = np.full((len(sizes[0]), steps + 1), np.inf)
    for way, size in enumerate(sizes[0]):
        best[way, size:] = chain.seconds[0][way]
    came = []
    for between, seconds, size in zip(chain.between, chain.seconds[1:], sizes[1:], strict=True):
        ways = best[:, None, :] + between[:, :, None]
        came.append(ways.argmin(axis=0))
        least, best = ways.min(axis=0), np.full((len(size), steps + 1), np.inf)
        for way, count in enumerate(size):
            if count <= steps:
                best[way, count:] = least[way, : steps + 1 - count] + seconds[way]
    if not np.isfinite(best[:, steps]).any():
        return None
    at, chosen = steps, [int(best[:, steps].argmin())]
    for step, size in zip(reversed(came), reversed(sizes[1:]), strict=True):
        at -= size[chosen[-1]]
        chosen.append(int(step[chosen[-1], at]))
    return tuple(reversed(chosen))
