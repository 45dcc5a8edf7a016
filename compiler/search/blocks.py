"""A model as a chain of blocks, each with one choice of a sharding over `tp`: the tensors that it shards, and the transition to the next
block.

    records    the batch is cut over tp, too: a rank computes its records, with all weights
    whole      every rank of tp computes all
    sharded    the dims that are linked are cut: an AllReduce of what is summed over them, forward, and of the cotangents of what made them

A block is a set of linked dims that can be cut, with the nodes behind it up to the next set. Records come before all else, since a plan
says so of the inputs; behind them what is sharded gathers them. Layouts are changed as the compiler changes them (`lower`), and each step
has the time of its collective.

Chooses the best sharding of each block of a chain by a shortest path; with a memory limit, over memory in discrete steps.

    seconds[k][a]       of block k in its way a           memory[k][a]     the bytes that it keeps then
    between[k][a, b]    of block k in way a before block k + 1 in way b; infinite where b cannot follow

Without a limit `shortest` is exact. `within` rounds the memory of each block up to a step of the limit: what it finds is within the limit,
and nothing that is within the limit by as many steps as there are blocks is faster.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.cost.machine import Link
from partc.compiler.layout.layout import Layout, layout_of
from partc.compiler.layout.moves import AllGather, AllReduce, AllToAll, ReduceScatter
from partc.compiler.layout.reshard import lower
from partc.compiler.proposal.flow import stored_bytes
from partc.compiler.proposal.linked import Linked
from partc.compiler.search.candidate import Candidate
from partc.compiler.search.estimate import Estimates, Sharding
from partc.compiler.search.work import Work
from partc.runtime.artifact.format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER


class Placing(IntEnum):
    """A choice of the sharding of a block over `tp`."""

    RECORDS = 0
    WHOLE = 1
    SHARDED = 2


_OPS = {AllReduce: ALL_REDUCE, ReduceScatter: REDUCE_SCATTER, AllGather: ALL_GATHER, AllToAll: ALL_TO_ALL}


@dataclass(frozen=True)
class Block:
    """A set of linked dims with the nodes of its block, the sharding if it is sharded, and the bytes that it hands on.

    `counted`: how many nodes have which work, and whether they are sharded then.
    """

    nodes: tuple[ir.Node, ...]
    counted: Counter[tuple[Work, bool]]
    sharding: Sharding
    weights: float
    hands_on: float
    cost_key: Hashable
    """A key that is equal for blocks of equal cost."""


def blocks_of(estimates: Estimates, sets: Sequence[Linked]) -> list[Block]:
    """Returns the nodes before all sets, and the blocks of the sets, in order."""
    work = estimates.work
    of: dict[ir.Node, int] = {node: k for k, one in enumerate(sets) for node in one.nodes}
    for node in work.program.model.graph:
        if node not in of:
            before = [of[made] for value in node.inputs if value is not None and (made := value.producer()) in of]
            of[node] = max(before, default=-1)
    members: dict[int, list[ir.Node]] = {k: [] for k in range(-1, len(sets))}
    for node in work.of:
        members[of[node]].append(node)
    blocks, counted = [], set[ir.Value]()
    for k, nodes in members.items():
        weights = {value for node in nodes for value in node.inputs if value is not None and value.is_initializer()}
        later = {
            value for node in nodes for value in node.outputs if any(of.get(use.node, k) > k for use in value.uses())
        }
        own = float(sum(map(stored_bytes, weights - counted)))
        counted |= weights
        places = tuple(sets[k].places) if k >= 0 else ()
        sharding, size = Sharding.of(work, places), max(map(work.bytes, later), default=0.0)
        counts = Counter((work.of[node], node in sharding.nodes) for node in nodes)
        likeness = frozenset(counts.items()), sharding.weights, sharding.forward, sharding.backward, own
        blocks.append(Block(tuple(nodes), counts, sharding, own, size, likeness))
    return blocks


def chain_of(estimates: Estimates, blocks: Sequence[Block], candidate: Candidate) -> Chain:
    """The ways of the blocks on the ranks of a candidate, with their times and bytes, and those of the layouts between them."""
    known: dict[object, list[tuple[float, float]]] = {}
    rows = []
    for one in blocks:
        if one.cost_key not in known:
            known[one.cost_key] = [_cost(estimates, one, candidate, way) for way in Placing]
        rows.append(known[one.cost_key])
    seconds = [np.array([pair[0] for pair in row]) for row in rows]
    memory = [np.array([pair[1] for pair in row]) for row in rows]
    between = [_between(estimates, one, candidate) for one in blocks[:-1]]
    return Chain(seconds, memory, between)


def _cost(estimates: Estimates, block: Block, candidate: Candidate, way: Placing) -> tuple[float, float]:
    """Seconds of a step, and bytes, of a block."""
    degrees, processor = candidate.degrees, estimates.processor(candidate.degrees.ranks)
    trains, link = estimates.slots is not None, estimates.link(1, degrees.tp)
    records = degrees.shards * candidate.microbatches * (degrees.tp if way is Placing.RECORDS else 1)
    total = kept = 0.0
    for (work, is_sharded), many in block.counted.items():
        shards = degrees.tp if way is Placing.SHARDED and is_sharded else 1
        again = 1 + candidate.recompute if trains else 1
        forward = again * work.seconds(processor, records, shards)
        total += (
            many
            * estimates.turns(degrees.ranks)
            * (forward + (work.backward(processor, records, shards) if trains else 0.0))
        )
        kept += many * work.output_elements / records / shards if trains else 0.0
    if way is Placing.SHARDED:
        given = [*block.sharding.forward, *(block.sharding.backward if trains else ())]
        total += sum(link.collective(ALL_REDUCE, degrees.tp, size / records) for size in given)
    cut = block.sharding.weights if way is Placing.SHARDED else 0.0
    own = block.weights - cut + cut / degrees.tp
    seconds = total * candidate.microbatches + estimates.after(
        candidate, own, degrees.tp if way is Placing.RECORDS else 1
    )
    return seconds, own * (2 + (estimates.slots or 0) if trains else 1) + kept


def _between(estimates: Estimates, block: Block, candidate: Candidate) -> np.ndarray:
    """Seconds between a block and the next one, by their ways; what is not handed on as it is, the compiler must bring."""
    size, tp = block.hands_on / candidate.degrees.shards / candidate.microbatches, candidate.degrees.tp
    cut, whole = layout_of((tp,), ((0,),)), layout_of((tp,), ((),))
    link, seconds = estimates.link(1, tp), np.zeros((len(Placing), len(Placing)))
    gathered = _seconds(cut, whole, size, link) + (
        _seconds(whole, cut, size, link) if estimates.slots is not None else 0
    )
    seconds[Placing.RECORDS, Placing.SHARDED] = candidate.microbatches * gathered
    seconds[Placing.RECORDS, Placing.WHOLE] = seconds[Placing.WHOLE, Placing.RECORDS] = seconds[
        Placing.SHARDED, Placing.RECORDS
    ] = np.inf
    return seconds


def _seconds(source: Layout, target: Layout, size: float, link: Link) -> float:
    """The seconds of the steps from one layout to another of a value of so many bytes on all ranks of an axis."""
    group = tuple(range(source.size))
    total, now = 0.0, source
    for move in lower(source, target, group, group):
        if (op := _OPS.get(type(move))) is not None:
            total += link.collective(op, now.size, float(size / np.prod(now.shards or (1,))))
        now = move.after
    return total


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
