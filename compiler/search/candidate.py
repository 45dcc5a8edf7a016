"""The candidates of a search: how many ranks share the batch, a layer and the stages, with microbatches, schedule, ZeRO and recomputing.

    ranks 4     (stages, dp, tp) = (1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 2, 1), (4, 1, 1), ... and those of fewer ranks

The order is fixed, so that a search of the same model gives the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from partc.compiler.proposal.degrees import Degrees

MOST_MICROBATCHES = 64
"""More are in no candidate: each is written into the programs of its ranks."""
SCHEDULES = ("1f1b", "zb_h1")
_NODE = 8
"""Ranks of a host that Megatron's recipe shares a layer among."""


@dataclass(frozen=True)
class Fixed:
    """Degrees that are given; None for one that is searched."""

    tp: int | None = None
    dp: int | None = None
    stages: int | None = None

    def allows(self, degrees: Degrees) -> bool:
        """Whether these degrees are as given."""
        pairs = ((self.tp, degrees.tp), (self.dp, degrees.dp), (self.stages, degrees.stages))
        return all(given in (None, own) for given, own in pairs)

    @property
    def least(self) -> Degrees:
        """The degrees with 1 for those that are searched."""
        return Degrees(self.tp or 1, self.dp or 1, self.stages or 1)


@dataclass(frozen=True)
class Candidate:
    """`schedule`: of a training in stages; `zero`: the optimizer is sharded over `dp`; `recompute`: modules in lists are computed again.

    `by_module`: over `tp` each module is sharded, whole, or has its part of the records, as is fastest; else all are that can be.
    """

    degrees: Degrees
    microbatches: int = 1
    schedule: str = ""
    zero: bool = False
    recompute: bool = False
    by_module: bool = False

    def __str__(self) -> str:
        one = self.degrees
        parts = [f"dp {one.dp}"] * (one.dp > 1) + [f"tp {one.tp}"] * (one.tp > 1)
        parts += ["by module"] * self.by_module + [f"{one.stages} stages"] * (one.stages > 1)
        parts += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        parts += [self.schedule] * bool(self.schedule) + ["ZeRO"] * self.zero + ["recompute"] * self.recompute
        return ", ".join(parts) or "one rank"


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [one for one in range(1, number + 1) if number % one == 0]


def degrees_of(ranks: int, fixed: Fixed) -> list[Degrees]:
    """All degrees of as many ranks or a divisor of them, those of more ranks first."""
    found = [
        Degrees(tp, used // tp // stages, stages)
        for used in reversed(divisors(ranks))
        for stages in divisors(used)
        for tp in divisors(used // stages)
    ]
    return [one for one in found if fixed.allows(one)]


def candidates(
    degrees: Degrees, records: int | None, trains: bool, again: bool, sharded: bool, by_module: bool = False
) -> Iterator[Candidate]:
    """The candidates of degrees. `records`: of a batch, None where a model has none; `again`: whether modules can be recomputed;
    `sharded`: whether the plan shards its optimizer already; `by_module`: whether modules are sharded in several ways."""
    if records is None:
        if degrees.dp == degrees.stages == 1:
            yield Candidate(degrees)
        return
    if records % degrees.dp:
        return
    each = records // degrees.dp
    counts = [one for one in divisors(each) if one <= MOST_MICROBATCHES and (one == 1 or trains or degrees.stages > 1)]
    for count in counts:
        for schedule in SCHEDULES if trains and degrees.stages > 1 and count > 1 else ("",):
            for zero in (False, True) if trains and degrees.dp > 1 and not sharded else (False,):
                for recompute in (False, True) if again else (False,):
                    for each_way in (False, True) if by_module else (False,):
                        yield Candidate(degrees, count, schedule, zero, recompute, each_way)


def baselines(ranks: int, records: int | None, trains: bool, most: int) -> dict[str, Candidate]:
    """By name what is usually chosen. `most`: among how many ranks a layer can be shared at most."""
    tensor = max(one for one in divisors(ranks) if one <= min(most, _NODE))
    found = {
        "one rank": Degrees(),
        "data parallel": Degrees(dp=ranks),
        "tensor parallel": Degrees(tp=ranks),
        "stages": Degrees(stages=ranks),
        "Megatron": Degrees(tensor, ranks // tensor),
    }
    for half in divisors(ranks)[1:2]:
        found |= {
            "data parallel, stages": Degrees(dp=ranks // half, stages=half),
            "tensor parallel, stages": Degrees(tp=ranks // half, stages=half),
        }
    made: dict[str, Candidate] = {}
    for name, degrees in found.items():
        count = _usual_microbatches(degrees, records)
        one = Candidate(degrees, count, "1f1b" if trains and count > 1 else "")
        if one not in made.values() and (records is not None or degrees.dp == degrees.stages == 1):
            made[name] = one
    return {name: one for name, one in made.items() if records is None or records % one.degrees.dp == 0}


def _usual_microbatches(degrees: Degrees, records: int | None) -> int:
    """Twice as many as stages, or the next smaller number that divides the batch."""
    if degrees.stages == 1 or records is None or records % degrees.dp:
        return 1
    return max(one for one in divisors(records // degrees.dp) if one <= 2 * degrees.stages)
