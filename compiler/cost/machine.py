"""The speeds of a machine: the seconds of an op on one of its targets, and of a message or a collective between its ranks.

    curve      seconds by an amount, measured at some amounts: between two of them a straight line, above the largest its speed, below
               the smallest its time: what any such thing takes at least
    product    curve(FLOP of one matrix) for each matrix, or what its bytes take if that is more
    others     curve(bytes moved), of the op's kernel
    few        curve(FLOP) of products of few rows with a constant weight, in float32 or in 4 bits: what drafts cost
    collective hops * latency + share * bytes / speed, both taken from one that was measured among `ranks`: the same, or an AllReduce

With p ranks of which each gives b bytes:

    op             hops        share        op          hops     share
    AllReduce      2(p - 1)    2(p - 1)/p   AllGather   p - 1    p - 1
    ReduceScatter  p - 1       (p - 1)/p    Broadcast   p - 1    1
    AllToAll       p - 1       (p - 1)/p    Reduce      p - 1    1
    Route          2(p - 1)    (p - 1)/p    Return      p - 1    (p - 1)/p

AllReduce, Broadcast and Reduce are by a tree where that is faster, as with many ranks and few bytes: log2(p) levels, twice of an AllReduce,
of which each sends all bytes.

Ranks of a host share its memory, and may share more: what a target takes is known of a rank whose host has no other, and of each of so many
that work at the same time. A plan is priced by how many ranks it has on a host: between the two along a straight line, beyond as with many.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, RETURN, ROUTE

FALLBACK, MATMUL = "elementwise", "matmul"
"""The kernel, and the product, whose curves stand for those that a machine file leaves out."""
FEW, FEW_INT4 = "few", "few_int4"
"""The products of few rows with a constant weight, of which step times of drafts are told."""


@dataclass(frozen=True)
class Curve:
    """Seconds by an amount: the points that were measured, by rising amounts."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, amount: float) -> float:
        amounts = [one for one, _ in self.points]
        at = bisect.bisect_right(amounts, amount)
        if at == 0:
            return self.points[0][1]
        (low, least), last = self.points[at - 1], self.points[-1]
        if at == len(self.points):
            return last[1] * amount / last[0]
        high, most = self.points[at]
        return least + (most - least) * (amount - low) / (high - low)

    def streamed(self, amount: float) -> float:
        """Seconds of an amount that no cache holds: at the speed of the largest that was measured, or more where it is small."""
        most, seconds = self.points[-1]
        return max(self(amount), amount * seconds / most)

    @property
    def least(self) -> float:
        """Seconds at the smallest amount."""
        return self.points[0][1]

    def towards(self, other: Curve, share: float) -> Curve:
        """The curve between this one, at a share of 0, and another one, at 1."""
        amounts = sorted({amount for one in (self, other) for amount, _ in one.points})
        return Curve(tuple((one, self(one) + share * (other(one) - self(one))) for one in amounts))


@dataclass(frozen=True)
class Processor:
    """A target: seconds of a session's run, and of a step beside its actions; curves by FLOP of products, and by bytes of others.

    They hold where so many `ranks` of a host work at the same time; `alone`: the same for one whose host has no other, None where that is
    not known. It has the same curves, and is slower in none.
    """

    session: float
    step: float
    products: Mapping[str, Curve]
    kernels: Mapping[str, Curve]
    alone: Processor | None = None
    ranks: int = 1

    def kernel(self, name: str) -> Curve:
        """The curve of a kernel by bytes."""
        return self.kernels.get(name) or self.kernels[FALLBACK]

    def among(self, busy: int) -> Processor:
        """The speeds of the processor when `busy` ranks of a host compute at the same time."""
        single = self.alone
        if single is None:
            return self
        share = min(1.0, max(0.0, (busy - 1) / max(1, self.ranks - 1)))
        products, kernels = (
            {name: alone[name].towards(curve, share) for name, curve in some.items()}
            for alone, some in ((single.products, self.products), (single.kernels, self.kernels))
        )
        session, step = (
            own + share * (more - own) for own, more in ((single.session, self.session), (single.step, self.step))
        )
        return Processor(session, step, products, kernels)


@dataclass(frozen=True)
class Link:
    """What connects ranks: seconds by bytes of a message, and by bytes that each of `ranks` that are `stride` apart gives an AllReduce.

    `split`: the same of those collectives of which ranks get shards or give them, as far as they were measured by themselves.
    `overlap`: the share of a collective that goes on beside a computation; the rest the rank does itself when it waits. `wake`: what the
    first session behind a wait takes more than one behind another, since the caches are cold.
    """

    name: str
    ranks: int
    stride: int
    overlap: float
    wake: float
    send: Curve
    all_reduce: Curve
    split: Mapping[str, Curve] = field(default_factory=dict)

    def collective(self, op: str, ranks: int, given_bytes: float) -> float:
        """Seconds of a collective among so many ranks that each give so many bytes: around a ring, or by a tree where that is faster."""
        if ranks < 2:
            return 0.0
        like = ALL_TO_ALL if op in _ROUTES else op
        measured, curve = (like, self.split[like]) if like in self.split else (ALL_REDUCE, self.all_reduce)
        own_hops, own_share = law(measured, self.ranks)
        latency = curve.least / own_hops
        sent = max(0.0, curve(given_bytes) - curve.least) / own_share
        hops, share = law(op, ranks)
        ring = hops * latency + share * sent
        if op in _SPLIT:
            return ring
        levels = (2 if op == ALL_REDUCE else 1) * math.ceil(math.log2(ranks))
        return min(ring, levels * (latency + sent))


_ROUTES = (ROUTE, RETURN)
"""Collectives that send rows as an AllToAll, on average over ranks; before a Route ranks tell each other how many."""
_SPLIT = (ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, EXCHANGE, *_ROUTES)
"""Collectives of which each rank gets another result, or all of what all give: no tree sends less."""


def law(op: str, ranks: int) -> tuple[float, float]:
    """Hops, and bytes that each rank sends for each byte that it gives."""
    others = ranks - 1
    if op == ALL_REDUCE:
        return 2.0 * others, 2.0 * others / ranks
    if op in (REDUCE_SCATTER, ALL_TO_ALL, *_ROUTES):
        return float(others) * (2 if op == ROUTE else 1), others / ranks
    return float(others), float(others) if op == ALL_GATHER else 1.0


@dataclass(frozen=True)
class Machine:
    """A host of `cores` which its ranks share, 0 where each has a device of its own; `segments`: seconds by digest of what was measured."""

    where: str
    cores: int
    processors: Mapping[str, Processor]
    links: Sequence[Link]
    segments: Mapping[str, float] = field(default_factory=dict)

    def processor(self, target: str) -> Processor:
        """The speeds of a target, of one that is not in the file those of the first."""
        return self.processors.get(target) or next(iter(self.processors.values()))

    def busy(self, ranks: int, hosts: int = 1) -> int:
        """How many of these ranks work at the same time on a host: at most its cores, if they share them, and at most as are known of."""
        most = max(one.ranks for one in self.processors.values())
        return min(-(-ranks // hosts), self.cores or most, most)

    def among(self, busy: int) -> Machine:
        """The machine with the speeds that hold when `busy` ranks of a host compute at the same time."""
        return replace(self, processors={name: one.among(busy) for name, one in self.processors.items()})

    def link(self, ranks: Sequence[int]) -> Link:
        """The link that connects these ranks: the one that was measured at their stride, else the first."""
        strides = {later - one for one, later in itertools.pairwise(ranks)}
        stride = strides.pop() if len(strides) == 1 else 0
        return next((one for one in self.links if one.stride == stride), self.links[0])
