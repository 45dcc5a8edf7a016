"""Values on ranks in memory: scattered as a layout says, changed as a step says, and checked shard by shard."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from partc.compiler.layout.exchange import Span, span_of, within
from partc.compiler.layout.layout import Box, Layout
from partc.compiler.layout.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MaskReplicas,
    Move,
    Reduce,
    ReduceScatter,
    Slice,
    Transfer,
    ZeroPad,
)

Held = dict[int, np.ndarray]
Place = tuple[slice, ...]
REDUCE = {"sum": np.add.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce}


def layouts(mesh: tuple[int, ...], rank: int, reduce: str = "sum") -> Iterator[Layout]:
    """Every layout of a value of `rank` dims: each axis cuts a dim, repeats or awaits; the axes of a dim in every order."""
    for places in itertools.product((None, "P", *range(rank)), repeat=len(mesh)):
        partial = tuple((axis, reduce) for axis, place in enumerate(places) if place == "P")
        orders = [itertools.permutations(a for a, place in enumerate(places) if place == dim) for dim in range(rank)]
        yield from (Layout(mesh, cuts, partial) for cuts in itertools.product(*orders))


def shard(layout: Layout, index: int, value: np.ndarray) -> np.ndarray:
    return value[tuple(slice(begin, end) for begin, end in layout.box(index, value.shape))]


def scatter(value: np.ndarray, layout: Layout, group: tuple[int, ...], rng: np.random.Generator) -> Held:
    """Its shards; terms are unlike each other, the same on all ranks that hold the same one."""
    axes = [axis for axis, _ in layout.partial]
    count = math.prod(layout.mesh[axis] for axis in axes)
    terms = rng.integers(-9, 9, (count, *value.shape)) * 1000 ** np.arange(count).reshape(-1, *[1] * value.ndim)
    match {reduce for _, reduce in layout.partial}:
        case found if found == {"sum"}:
            terms[-1] = value - terms[:-1].sum(axis=0)
        case found if found:
            away = 1 + abs(terms) if found == {"min"} else -1 - abs(terms)
            best = rng.integers(count, size=value.shape)
            terms = value + np.where(np.arange(count).reshape(-1, *[1] * value.ndim) == best, 0, away)
        case _:
            terms = value[None]
    held = {}
    for index, rank in enumerate(group):
        at = layout.coordinates(index)
        term = 0
        for axis in axes:
            term = term * layout.mesh[axis] + at[axis]
        held[rank] = shard(layout, index, terms[term])
    return held


def assert_held(held: Held, value: np.ndarray, layout: Layout, group: tuple[int, ...]) -> None:
    """Each rank has its shard, and terms give the value whenever one of each is taken."""
    axes = [axis for axis, _ in layout.partial]
    for indices in layout.groups(axes) if axes else ((index,) for index in range(len(group))):
        terms = np.stack([held[group[index]] for index in indices])
        got = REDUCE[layout.partial[0][1]](terms, axis=0) if axes else terms[0]
        want = shard(layout, indices[0], value)
        assert np.array_equal(got, want), (
            f"ranks {[group[index] for index in indices]} of {layout}:\n{got}\nfor\n{want}"
        )


def after(move: Move, held: Held, shape: tuple[int, ...]) -> Held:
    """What the group of a step holds when it is done; checks that each rank's shard has the shape that the layout says."""
    if isinstance(move, Reduce):
        found = {
            ranks[move.root]: REDUCE[move.reduce](np.stack([held[rank] for rank in ranks]), axis=0)
            for ranks in move.sets
        }
    else:
        found = _exchanged(move, held, shape) if isinstance(move, Exchange | Transfer) else _collective(move, held)
    for index, rank in enumerate(move.group):
        assert found[rank].shape == tuple(end - begin for begin, end in move.after.box(index, shape))
    return found


def _collective(move: Move, held: Held) -> Held:
    found = {}
    for indices in move.after.groups(move.axes):
        ranks = [move.group[index] for index in indices]
        mine = [held[rank] for rank in ranks]
        count = len(ranks)
        for place, rank in enumerate(ranks):
            match move:
                case AllReduce(reduce=reduce):
                    found[rank] = REDUCE[reduce](np.stack(mine), axis=0)
                case ReduceScatter(dim=dim, reduce=reduce):
                    found[rank] = np.split(REDUCE[reduce](np.stack(mine), axis=0), count, axis=dim)[place]
                case AllGather(dim=dim):
                    found[rank] = np.concatenate(mine, axis=dim)
                case AllToAll(split_dim=split_dim, concat_dim=concat_dim):
                    parts = [np.split(theirs, count, axis=split_dim)[place] for theirs in mine]
                    found[rank] = np.concatenate(parts, axis=concat_dim)
                case Slice(dim=dim):
                    found[rank] = np.split(mine[place], count, axis=dim)[place]
                case ZeroPad(dim=dim):
                    parts = [mine[place] * (other == place) for other in range(count)]
                    found[rank] = np.concatenate(parts, axis=dim)
                case MaskReplicas(reduce=reduce):
                    found[rank] = mine[place] * (place == 0) if reduce == "sum" else mine[place]
    return found


def _place(span: Span, layout: Layout, index: int, shape: tuple[int, ...]) -> Place:
    """Where a part of the value lies in a rank's shard."""
    return tuple(slice(*bounds) for bounds in _offsets(span, _span_of(layout, index), shape))


@functools.cache
def offsets(span: Span, shape: Sequence[int]) -> Box:
    """Fractions of a shard of `shape` as begin and end per dim; they must be whole numbers."""
    found = []
    for dim, ((begin, end), size) in enumerate(zip(span, shape, strict=True)):
        first, last = begin * size, end * size
        if first.denominator != 1 or last.denominator != 1:
            raise ValueError(f"dim {dim} of {size} has no whole place for {begin}..{end}")
        found.append((int(first), int(last)))
    return tuple(found)


def _offsets(span: Span, held: Span, shape: tuple[int, ...]) -> Box:
    return offsets(within(span, held), shape)


_span_of = functools.cache(span_of)


def _exchanged(move: Exchange | Transfer, held: Held, shape: tuple[int, ...]) -> Held:
    sizes = [[end - begin for begin, end in move.after.box(index, shape)] for index in range(len(move.group))]
    found = {rank: np.empty(size, np.int64) for rank, size in zip(move.group, sizes, strict=True)}
    for source, target, there, here in _copies(move, shape):
        found[target][here] = held[source][there]
    return found


@functools.cache
def _copies(move: Exchange | Transfer, shape: tuple[int, ...]) -> list[tuple[int, int, Place, Place]]:
    """By part of an exchange its source and target, and where it lies in the shard of each; checks that parts fill each shard once.

    They follow from the layouts and the shape, and many pairs of layouts have a step alike.
    """
    source_group = move.source_group if isinstance(move, Transfer) else move.group
    sent, copies = set(), []
    times = [
        np.zeros([end - begin for begin, end in move.after.box(k, shape)], np.int64) for k in range(len(move.group))
    ]
    received = [0] * len(move.group)
    for part in move.routes.parts():
        assert part not in sent
        sent.add(part)
        k, index = source_group.index(part.source), move.group.index(part.target)
        there, here = (
            _place(part.span, layout, at, tuple(end - begin for begin, end in layout.box(at, shape)))
            for layout, at in ((move.before, k), (move.after, index))
        )
        times[index][here] += 1
        received[index] += times[index][here].size if part.source != part.target else 0
        copies.append((part.source, part.target, there, here))
    assert all((one == 1).all() for one in times)
    assert received == [share * math.prod(shape) for share in move.routes.received()]
    return copies
