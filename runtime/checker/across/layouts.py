"""Proves that each collective turns its layout before into its layout after: the manifest's two layouts are compared with the nodes.

A layout gives every rank a shard and the number of its partial value (`rank_shards.py`). For the ranks of a list, in its order, with all
other dims equal:

    AllReduce       they have one shard, and all partial values to be reduced, each once, by the layout's reduction; the shard stays
    ReduceScatter   the same, and the i-th gets the i-th of p equal parts along `axis`
    AllGather       their shards are contiguous along `axis`, and each gets their concatenation
    AllToAll        the i-th gets the i-th part along `split_axis` of shards that are contiguous along `concat_axis`
    Reduce          as AllReduce, and the root gets the result
    Broadcast       each of the others gets the root's value
    Exchange        each box that one rank sends is the box of the value that the other receives, and of the same partial value
    Pull, Push      the owners' rows are equal runs in their order, and columns are the same on all (`lookups.py`)
    Route, Return   columns are the same before and after
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise

from partc.runtime.artifact.comm.collective_node import CollectiveCall
from partc.runtime.artifact.comm.collectives import GROUP_OPS
from partc.runtime.artifact.comm.lookup_node import LookupCall
from partc.runtime.artifact.format import EXCHANGE, Collective, Manifest
from partc.runtime.checker.across.call_node import AGAIN, CallNode
from partc.runtime.checker.across.lookups import check_owners
from partc.runtime.checker.across.rank_shards import RankShard, Shard, ShardLayout, Span, layout_of
from partc.runtime.errors import Violation


def check_layouts(manifest: Manifest, calls: Mapping[int, Sequence[CallNode]]) -> Iterator[Violation]:
    """Yields violations for collectives that do not lead from the layout before to the layout after; their nodes are already checked."""
    known: dict[str, ShardLayout] = {}
    nodes: dict[int, dict[int, CallNode]] = {}
    for rank, there in calls.items():
        for node in there:
            nodes.setdefault(node.call.tag, {})[rank] = node
    for record in manifest.collectives:
        if record.given is None or record.made is None or record.op not in GROUP_OPS:
            continue
        try:
            before, after = (layout_of(one, known) for one in (record.given, record.made))
            lists = [
                ranks
                for ranks in manifest.groups.get(record.group, [])
                if any(r in nodes.get(record.tag, {}) for r in ranks)
            ]
            for ranks in lists:
                _check_list(record, ranks, nodes[record.tag], before, after)
        except (ValueError, KeyError, IndexError) as error:
            said = f"rank {error.args[0]} has no shard of it" if isinstance(error, KeyError) else str(error)
            fact = f"collective {record.tag}, {record.op} of '{record.value}', does not make its second layout of its first: {said}"
            yield Violation("manifest.json", fact, help=AGAIN)


def _check_list(
    record: Collective,
    ranks: Sequence[int],
    nodes: Mapping[int, CallNode],
    layout_before: ShardLayout,
    layout_after: ShardLayout,
) -> None:
    """Raises ValueError if the nodes of a list's ranks do not turn the layout `layout_before` into `layout_after`."""
    if record.op == EXCHANGE:
        for rank in ranks:
            if rank in nodes:
                _check_exchange(nodes[rank].collective, rank, nodes, layout_before, layout_after)
        return
    call = nodes[ranks[0]].call
    if isinstance(call, LookupCall):
        check_owners(record, call, ranks, layout_before, layout_after)
        return
    if not isinstance(call, CollectiveCall):
        raise ValueError("no value moves at the border of a body")
    kind = call.kind
    if kind.root == "gives":
        root = layout_before.shards[ranks[call.root]]
        for rank in ranks:
            if rank != ranks[call.root] and layout_after.shards[rank] != root:
                raise ValueError(
                    f"rank {rank} gets {_box(root.shard)} of the value, and should have {_box(layout_after.shards[rank].shard)}"
                )
        return
    getting = [ranks[call.root]] if kind.root == "takes" else ranks
    before, after = [layout_before.shards[rank] for rank in ranks], [layout_after.shards[rank] for rank in getting]
    if kind.reduces:
        _check_reduction(call, ranks, before, layout_before, layout_after)
    shards = [one.shard for one in before]
    wanted = shards[: len(getting)]
    if kind.joins:
        wanted = [_joined(shards, _place(call.join_axis, shards[0]))] * len(getting)
    if kind.splits:
        axis = _place(call.axis, shards[0])
        for at, (first, last) in enumerate(shard[axis] for shard in shards):
            step = (last - first) / len(ranks)
            wanted[at] = _with(wanted[at], axis, (first + at * step, first + (at + 1) * step))
    for rank, want, have in zip(getting, wanted, after, strict=True):
        if want != have.shard:
            raise ValueError(f"rank {rank} gets {_box(want)} of the value, and should have {_box(have.shard)}")


def _check_reduction(
    call: CollectiveCall,
    ranks: Sequence[int],
    before: Sequence[RankShard],
    layout_before: ShardLayout,
    layout_after: ShardLayout,
) -> None:
    if (
        len(ranks) > 1
        and layout_before.reductions != {call.reduce}
        and not (layout_before.reductions - layout_after.reductions) <= {call.reduce}
    ):
        raise ValueError(
            f"its {call.reduce} is not the reduction of its partial values, {' and '.join(sorted(layout_before.reductions)) or 'none'}"
        )
    if len(ranks) > 1 and call.reduce not in layout_before.reductions:
        raise ValueError(f"its {call.reduce} reduces a value that is not partial")
    if len({one.term for one in before}) != len(ranks) or len(ranks) * layout_after.terms != layout_before.terms:
        raise ValueError(
            f"ranks {', '.join(map(str, ranks))} reduce the partial values {[one.term for one in before]} of {layout_before.terms}"
        )
    if len({one.shard for one in before}) > 1:
        raise ValueError(f"ranks {', '.join(map(str, ranks))} reduce shards of different places")


def _check_exchange(
    call: CollectiveCall,
    rank: int,
    nodes: Mapping[int, CallNode],
    layout_before: ShardLayout,
    layout_after: ShardLayout,
) -> None:
    """Raises ValueError unless each box that a rank receives is the region of the value that its peer sends."""
    taken: dict[int, int] = {}
    for shard in call.takes:
        at = taken[shard.peer] = taken.get(shard.peer, -1) + 1
        gives = [one for one in nodes[shard.peer].collective.gives if one.peer == rank]
        source, target = layout_before.shards[shard.peer], layout_after.shards[rank]
        here, there = _inside(target.shard, shard.box), _inside(source.shard, gives[at].box)
        if here != there:
            raise ValueError(
                f"rank {shard.peer} gives {_box(there)} of the value, and rank {rank} takes it as {_box(here)}"
            )
        if source.term != target.term:
            raise ValueError(
                f"rank {shard.peer} gives partial value {source.term}, and rank {rank} takes it as number {target.term}"
            )


def _inside(shard: Shard, box: Sequence[tuple[int, int, int]]) -> Shard:
    """Returns a box of a shard as a box of the value."""
    return tuple(
        (first + (last - first) * Fraction(begin, of), first + (last - first) * Fraction(end, of))
        for (first, last), (begin, end, of) in zip(shard, box, strict=True)
    )


def _place(axis: int, shard: Shard) -> int:
    return axis % len(shard) if shard else 0


def _joined(shards: Sequence[Shard], axis: int) -> Shard:
    """Returns shards that are contiguous along an axis as one; raises ValueError if they are not."""
    for one, two in pairwise(shards):
        if one[axis][1] != two[axis][0] or _with(one, axis, two[axis]) != two:
            raise ValueError(f"{_box(two)} does not follow {_box(one)} along axis {axis}")
    return _with(shards[0], axis, (shards[0][axis][0], shards[-1][axis][1]))


def _with(shard: Shard, axis: int, span: Span) -> Shard:
    return (*shard[:axis], span, *shard[axis + 1 :])


def _box(shard: Shard) -> str:
    return f"[{', '.join(f'{begin} to {end}' for begin, end in shard)}]"
