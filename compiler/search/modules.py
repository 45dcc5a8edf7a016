"""The way of each module over `tp`: the shortest path through its blocks, and what one way saves against another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from partc.compiler.proposal.degrees import Degrees
from partc.compiler.search.blocks import Block, Placing, chain_of
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.chain import Chain, shortest, within
from partc.compiler.search.estimate import Estimates
from partc.runtime.units import seconds

_GAIN = 0.01
"""The share of the seconds or bytes of all modules by which the fastest ways must be better than all sharded to be a candidate."""


@dataclass(frozen=True)
class Modules:
    """A chain of blocks, the first one before all that can be sharded, and the fastest way of each."""

    chain: Chain
    ways: tuple[Placing, ...]

    @classmethod
    def of(
        cls,
        estimates: Estimates,
        blocks: Sequence[Block],
        degrees: Degrees,
        records: int | None,
        memory: int | None = None,
    ) -> Modules:
        """The ways on these degrees, of a batch of one microbatch; records are cut where they divide, and in one stage.

        Where the fastest ways need more than the memory of a rank, they are the fastest of those that do not, if there are any.
        """
        if len(blocks) < 2:
            return cls(Chain((), (), ()), ())
        chain = chain_of(estimates, blocks, Candidate(degrees))
        if records is None or records % (degrees.dp * degrees.tp) or degrees.stages > 1:
            for one in chain.seconds:
                one[Placing.RECORDS] = float("inf")
        ways = shortest(chain)
        if memory is not None and chain.cost(ways)[1] > memory:
            ways = within(chain, memory) or ways
        return cls(chain, tuple(map(Placing, ways)))

    @property
    def sharded(self) -> tuple[Placing, ...]:
        """All blocks sharded."""
        return (Placing.WHOLE, *(Placing.SHARDED,) * (len(self.ways) - 1))[: len(self.ways)]

    @property
    def has_records(self) -> bool:
        """Whether the batch is cut over `tp`, too."""
        return self.ways[:1] == (Placing.RECORDS,)

    @property
    def differ(self) -> bool:
        """Whether the fastest ways are neither all sharded, nor all of another kind, for which fewer ranks of `tp` do."""
        return Placing.SHARDED in self.ways[1:] and (self.has_records or self.ways[1:] != self.sharded[1:])

    @property
    def are_worth_it(self) -> bool:
        """Whether the fastest ways differ, and save more of the time or of the bytes than an estimate can tell."""
        if not self.differ:
            return False
        pairs = zip(self.difference(self.ways), self.chain.cost(self.sharded), strict=True)
        return any(more < -_GAIN * whole for more, whole in pairs)

    def difference(self, ways: Sequence[Placing]) -> tuple[float, float]:
        """Seconds of a step and bytes of a rank that these ways take more than all sharded."""
        (own, kept), (others, kept_there) = self.chain.cost(ways), self.chain.cost(self.sharded)
        return own - others, kept - kept_there

    def saved(self, ways: Sequence[Placing], blocks: Collection[int]) -> float:
        """Seconds that sharded blocks save against being whole, or having their records, whichever can be."""
        own, others = self.chain.cost(ways)[0], (Placing.WHOLE, Placing.RECORDS)
        costs = [self.chain.cost([other if k in blocks else way for k, way in enumerate(ways)])[0] for other in others]
        return min(costs) - own if min(costs) < float("inf") else 0.0

    def reason(self, ways: Sequence[Placing], block: int) -> str:
        """Why a block is not sharded."""
        what = "each rank has its part of the records" if ways[block] is Placing.RECORDS else "every rank computes it"
        other = [Placing.SHARDED if k == block else way for k, way in enumerate(ways)]
        more = self.chain.cost(other)[0] - self.chain.cost(ways)[0]
        return f"{what}, which saves about {seconds(more)} of a step" if 0 < more < float("inf") else what
