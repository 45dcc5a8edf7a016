"""The candidates of a search: the numbers of ranks that share the batch, a layer and the stages, with microbatches, schedule, ZeRO, stored
parameters and recomputation.

    ranks 4     (stages, dp, tp) = (1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 2, 1), (4, 1, 1), ... and those of fewer ranks

Of a model with layers of experts the ranks of dp, or a divisor of them that divides the experts, may share these.

The order is fixed, so that a search of the same model gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from partc.compiler.proposal.degrees import Degrees

MOST_MICROBATCHES = 64
"""More are in no candidate: each is written into the programs of its ranks."""
SCHEDULES = (("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2))
"""Schedules of a training, each with how many stages a rank has."""
_NODE = 8
"""Ranks of a host that Megatron's recipe shares a layer among."""


@dataclass(frozen=True)
class Fixed:
    """Degrees that are given; None for one that is searched."""

    tp: int | None = None
    dp: int | None = None
    stages: int | None = None
    ep: int | None = None
    cp: int | None = None

    def allows(self, degrees: Degrees) -> bool:
        """Whether these degrees are as given."""
        return all(given in (None, getattr(degrees, name)) for name, given in vars(self).items())

    @property
    def least(self) -> Degrees:
        """The degrees with 1 for those that are searched, and for a context that is not given."""
        return Degrees(**{name: given or 1 for name, given in vars(self).items()})


@dataclass(frozen=True)
class Candidate:
    """`schedule`: of a training in stages; `zero`: the optimizer is sharded over `dp`; `recompute`: modules in lists are computed again.

    `stored`: all parameters are stored in shards over `dp`, and gathered unit by unit; each microbatch reduces its gradients.
    `by_module`: over `tp` each module is sharded, whole, or has its part of the records, as is fastest; else all are that can be.
    `stages_each`: how many stages each of the groups of a pipeline has, of which `degrees` has `stages`.
    """

    degrees: Degrees
    microbatches: int = 1
    schedule: str = ""
    zero: bool = False
    recompute: bool = False
    by_module: bool = False
    stages_each: int = 1
    stored: bool = False

    @property
    def shards_update(self) -> bool:
        """Whether each rank of `dp` updates a shard of a parameter."""
        return self.zero or self.stored

    @property
    def stages(self) -> int:
        """The stages of all groups together."""
        return self.degrees.stages * self.stages_each

    @property
    def stage_groups(self) -> tuple[int, ...]:
        """Maps each stage to its group: in a loop, 0 1 0 1, or there and back, 0 1 1 0."""
        groups = range(self.degrees.stages)
        return (*groups, *reversed(groups)) if self.schedule == "zbv" else (*groups,) * self.stages_each

    def in_line(self, schedule: str = "") -> Candidate:
        """The same with one stage on each group, by another schedule."""
        return replace(self, schedule=schedule, stages_each=1)

    def __str__(self) -> str:
        one, on = self.degrees, f" on {self.degrees.stages} groups" if self.stages_each > 1 else ""
        parts = [f"dp {one.dp}"] * (one.dp > 1) + [f"ep {one.ep}"] * (one.ep > 1)
        parts += [f"context {one.cp}"] * (one.cp > 1) + [f"tp {one.tp}"] * (one.tp > 1)
        parts += ["by module"] * self.by_module + [f"{self.stages} stages{on}"] * (one.stages > 1)
        parts += [f"{self.microbatches} microbatches"] * (self.microbatches > 1)
        parts += [self.schedule] * bool(self.schedule) + ["ZeRO"] * self.zero
        parts += ["stored"] * self.stored + ["recompute"] * self.recompute
        return ", ".join(parts) or "one rank"


def divisors(number: int) -> list[int]:
    """All divisors, rising."""
    return [one for one in range(1, number + 1) if number % one == 0]


def degrees_of(ranks: int, fixed: Fixed, experts: int = 1) -> list[Degrees]:
    """All degrees of as many ranks or a divisor of them, those of more ranks first; `experts`: a divisor of those of all layers."""
    cp = fixed.least.cp
    degrees = [
        Degrees(tp, used // tp // stages, stages, ep, cp)
        for used in reversed(divisors(ranks // cp))
        for stages in divisors(used)
        for tp in divisors(used // stages)
        for ep in divisors(math.gcd(used // tp // stages, experts))
    ]
    return [one for one in degrees if fixed.allows(one)]


def candidates(
    degrees: Degrees,
    records: int | None,
    trains: bool,
    again: bool,
    sharded: bool,
    by_module: bool = False,
    each: Collection[int] = (1,),
    stores: bool = False,
) -> Iterator[Candidate]:
    """The candidates of degrees. `records`: of a batch, None where a model has none; `again`: whether modules can be recomputed;
    `sharded`: whether the plan shards its optimizer already; `by_module`: whether modules are sharded in several ways;
    `each`: how many stages a group can have; `stores`: whether parameters may be stored in shards."""
    if records is None:
        if degrees.dp == degrees.stages == 1:
            yield Candidate(degrees)
        return
    if records % degrees.dp:
        return
    own = records // degrees.dp
    counts = [one for one in divisors(own) if one <= MOST_MICROBATCHES and (one == 1 or trains or degrees.stages > 1)]
    scheduled = [pair for pair in SCHEDULES if pair[1] in each]
    shares = trains and degrees.dp > 1
    kept = [(False, False)] + [(True, False)] * (shares and not sharded) + [(False, True)] * (shares and stores)
    for count in counts:
        for schedule, many in scheduled if trains and degrees.stages > 1 and count > 1 else [("", 1)]:
            for zero, stored in kept:
                for recompute in (False, True) if again else (False,):
                    for each_way in (False, True) if by_module else (False,):
                        yield Candidate(degrees, count, schedule, zero, recompute, each_way, many, stored)


def baselines(ranks: int, records: int | None, trains: bool, most: int, cp: int = 1) -> dict[str, Candidate]:
    """Maps names to the usual choices, each with `cp` shards of a sequence. `most`: among how many ranks a layer can be shared at most."""
    ranks //= cp
    tensor = max(one for one in divisors(ranks) if one <= min(most, _NODE))
    usual = {
        "one rank" if cp == 1 else "context alone": Degrees(),
        "data parallel": Degrees(dp=ranks),
        "tensor parallel": Degrees(tp=ranks),
        "stages": Degrees(stages=ranks),
        "Megatron": Degrees(tensor, ranks // tensor),
    }
    for half in divisors(ranks)[1:2]:
        usual |= {
            "data parallel, stages": Degrees(dp=ranks // half, stages=half),
            "tensor parallel, stages": Degrees(tp=ranks // half, stages=half),
        }
    distinct: dict[str, Candidate] = {}
    for name, degrees in usual.items():
        degrees = replace(degrees, cp=cp)
        count = _usual_microbatches(degrees, records)
        one = Candidate(degrees, count, "1f1b" if trains and count > 1 else "")
        if one not in distinct.values() and (records is not None or degrees.dp == degrees.stages == 1):
            distinct[name] = one
    return {name: one for name, one in distinct.items() if records is None or records % one.degrees.dp == 0}


def _usual_microbatches(degrees: Degrees, records: int | None) -> int:
    """Twice as many as stages, or the next smaller number that divides the batch."""
    if degrees.stages == 1 or records is None or records % degrees.dp:
        return 1
    return max(one for one in divisors(records // degrees.dp) if one <= 2 * degrees.stages)
