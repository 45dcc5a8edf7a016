"""Each collective as rounds: the bytes that a rank puts into its part of the shared memory, and their combination.

    AllReduce       puts the source; reduces those of all. Among three ranks and more the last one to arrive does, and the others copy it;
                    a large one is reduced in shares: each rank reduces its share of all sources into a second round's room, from which
                    the others copy it
    ReduceScatter   puts one chunk of every block; reduces all ranks' chunks of its own block
    AllToAll        puts one chunk of every block; copies all ranks' chunks of its own block
    AllGather       puts the source; copies those of all
    Reduce, Gather  as AllReduce and AllGather, on the root alone
    Broadcast       the root puts the target; the others copy it

Terms are added in the order of the list, so that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from functools import partial

import numpy as np
import numpy.typing as npt
from partc.runtime.artifact.tensors.dtypes import Bytes

from ...artifact.format import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, MAX, REDUCE_SCATTER, REDUCE_TO, SUM
from ..transport import GATHER, CollectiveArgs
from .rounds import ROOM, Action, Rounds, SharedRooms

_SHARED = 1 << 16
"""Bytes from which an AllReduce of three ranks and more is reduced in shares. Where ranks share cores, one that fits into a single round is
not: the second round is one more sleep of each rank, which costs more than computing the sum on one rank.
"""
_ALIGNED = 64


class Chunked(Rounds):
    """A collective whose blocks of `block` bytes are moved in chunks, of which `parts` fit into a room.

    The actions are made once for each room.
    """

    def __init__(self, args: CollectiveArgs, rooms: Sequence[Sequence[Bytes]], own: int, block: int, parts: int = 1):
        self.args, self.rooms, self.index, self.ranks = args, rooms, own, len(args.ranks)
        step = ROOM // parts // _ALIGNED * _ALIGNED
        self.bounds = [(at, min(at + step, block)) for at in range(0, max(block, 1), step)]
        self.count = len(self.bounds)
        self.takes = args.op not in (REDUCE_TO, GATHER) or own == args.root
        self._quiet = Context()  # without warnings of numpy, in a sixth of the time of `np.errstate` in each call
        self._quiet.run(np.seterr, over="ignore", invalid="ignore")
        self._puts: dict[tuple[int, int], Action | None] = {}
        self._gets: dict[tuple[int, int], Action | None] = {}

    def put(self, index: int, turn: int) -> Action | None:
        if (index, turn) not in self._puts:
            self._puts[index, turn] = self.putting(index, turn)
        return self._puts[index, turn]

    def get(self, index: int, turn: int) -> Action | None:
        if (index, turn) not in self._gets:
            self._gets[index, turn] = self.getting(index, turn)
        return self._gets[index, turn]

    def putting(self, index: int, turn: int) -> Action | None:
        """Returns the action that puts a chunk of the source into the rank's room."""
        begin, end = self.bounds[index]
        return copying(self.rooms[turn][self.index][: end - begin], self.args.source[begin:end])

    def getting(self, index: int, turn: int) -> Action | None:
        """Returns the action that reads a chunk of the target from the rooms; None if this rank receives nothing."""
        raise NotImplementedError

    def reducing(self, terms: Sequence[Bytes], target: Bytes) -> Action:
        """Returns the action that reduces the terms, in their order. Like MPI it gives no warning of infinities and NaN."""
        kind, reduce = self.args.dtype.numpy, self.args.reduce
        first, second, *rest = (term.view(kind) for term in terms)
        into = target.view(kind)
        ufunc = np.add if reduce == SUM else np.maximum if reduce == MAX else np.minimum
        run = self._quiet.run
        if not rest:
            return partial(run, ufunc, first, second, into)
        return partial(run, _reduced, ufunc, first, second, rest, into)


class _AllReduce(Chunked):
    """Each rank reduces all rooms.

    In a single round of two ranks it uses its source in place of its own room, since the source is still the same.
    """

    def getting(self, index: int, turn: int) -> Action | None:
        begin, end = self.bounds[index]
        terms = [room[: end - begin] for room in self.rooms[turn][:-1]]
        if self.ranks == 2 and self.count == 1:
            terms[self.index] = self.args.source
        return self.reducing(terms, self.args.target[begin:end]) if self.takes else None


class _AllReduceByLast(Chunked):
    """The rank that closes the round reduces once, in `made`, because no rank may see a sum of only some of the terms."""

    def __init__(self, args: CollectiveArgs, rooms: Sequence[Sequence[Bytes]], own: int, block: int, made: Bytes):
        super().__init__(args, rooms, own, block)
        self._made = made
        self._closes: dict[tuple[int, int], Action] = {}

    def close(self, index: int, turn: int) -> Action | None:
        if (index, turn) not in self._closes:
            begin, end = self.bounds[index]
            *terms, common = (room[: end - begin] for room in self.rooms[turn])
            made = self._made[: end - begin]
            reduce, copy = self.reducing(terms, made), copying(common, made)
            self._closes[index, turn] = lambda: (reduce(), copy())
        return self._closes[index, turn]

    def getting(self, index: int, turn: int) -> Action | None:
        begin, end = self.bounds[index]
        return copying(self.args.target[begin:end], self.rooms[turn][-1][: end - begin])


class _SharedAllReduce(Chunked):
    """Each rank reduces a share; every second round has the reduced shares."""

    def __init__(self, args: CollectiveArgs, rooms: Sequence[Sequence[Bytes]], own: int, block: int):
        super().__init__(args, rooms, own, block)
        self.count *= 2

    def ahead(self, index: int) -> int:
        return 1 if index % 2 else super().ahead(index)

    def putting(self, index: int, turn: int) -> Action | None:
        if index % 2 == 0:
            return super().putting(index // 2, turn)
        begin, end = self._share(index, self.index)
        if begin == end:
            return None
        terms = [room[begin:end] for room in self.rooms[turn - 1][:-1]]
        return self.reducing(terms, self.rooms[turn][self.index][: end - begin])

    def getting(self, index: int, turn: int) -> Action | None:
        if index % 2 == 0:
            return None
        start, target = self.bounds[index // 2][0], self.args.target
        shares = [self._share(index, rank) for rank in range(self.ranks)]
        return partial(
            _copied,
            [
                (target[start + begin : start + end], self.rooms[turn][rank][: end - begin])
                for rank, (begin, end) in enumerate(shares)
            ],
        )

    def _share(self, index: int, rank: int) -> tuple[int, int]:
        """Returns the begin and end of a rank's share in a chunk."""
        begin, end = self.bounds[index // 2]
        size = end - begin
        share = -(-size // self.ranks // _ALIGNED) * _ALIGNED
        return min(rank * share, size), min((rank + 1) * share, size)


class _Blocks(Chunked):
    """AllToAll and ReduceScatter, which put a chunk of every block of the source."""

    def __init__(self, args: CollectiveArgs, rooms: Sequence[Sequence[Bytes]], own: int, block: int):
        super().__init__(args, rooms, own, block // len(args.ranks), len(args.ranks))
        self.sources = args.source.reshape(self.ranks, -1)

    def putting(self, index: int, turn: int) -> Action | None:
        begin, end = self.bounds[index]
        room = self.rooms[turn][self.index][: self.ranks * (end - begin)]
        return partial(np.copyto, room.reshape(self.ranks, -1), self.sources[:, begin:end])

    def getting(self, index: int, turn: int) -> Action | None:
        begin, end = self.bounds[index]
        size = end - begin
        given = [room[self.index * size : (self.index + 1) * size] for room in self.rooms[turn][:-1]]
        if self.args.op == REDUCE_SCATTER:
            return self.reducing(given, self.args.target[begin:end])
        targets = self.args.target.reshape(self.ranks, -1)
        return partial(_copied, [(targets[rank, begin:end], one) for rank, one in enumerate(given)])


class _Gather(Chunked):
    """AllGather and Gather."""

    def getting(self, index: int, turn: int) -> Action | None:
        if not self.takes:
            return None
        begin, end = self.bounds[index]
        targets = self.args.target.reshape(self.ranks, -1)
        return partial(
            _copied,
            [(targets[rank, begin:end], room[: end - begin]) for rank, room in enumerate(self.rooms[turn][:-1])],
        )


class _Broadcast(Chunked):
    def __init__(self, args: CollectiveArgs, rooms: Sequence[Sequence[Bytes]], own: int, block: int):
        super().__init__(args, rooms, own, block)
        self.takes = own != args.root

    def putting(self, index: int, turn: int) -> Action | None:
        begin, end = self.bounds[index]
        room = self.rooms[turn][self.index][: end - begin]
        return None if self.takes else partial(np.copyto, room, self.args.target[begin:end])

    def getting(self, index: int, turn: int) -> Action | None:
        begin, end = self.bounds[index]
        room = self.rooms[turn][self.args.root][: end - begin]
        return partial(np.copyto, self.args.target[begin:end], room) if self.takes else None


def rounds_of(args: CollectiveArgs, shared: SharedRooms, own_core: bool) -> Rounds:
    """Returns the rounds of a collective among the ranks that share these rooms; all of them have the same number of rounds.

    `own_core`: whether each rank of the host has a core of its own.
    """
    rooms, own, size = shared.rooms, shared.own, args.source.size
    if args.op == ALL_REDUCE and len(args.ranks) > 2:
        if size >= (_SHARED if own_core else ROOM + 1):
            return _SharedAllReduce(args, rooms, own, size)
        return _AllReduceByLast(args, rooms, own, size, shared.made)
    kinds: dict[str, type[Chunked]] = {
        ALL_REDUCE: _AllReduce,
        REDUCE_TO: _AllReduce,
        ALL_GATHER: _Gather,
        GATHER: _Gather,
        ALL_TO_ALL: _Blocks,
        REDUCE_SCATTER: _Blocks,
        BROADCAST: _Broadcast,
    }
    return kinds[args.op](args, rooms, own, args.target.size if args.op == BROADCAST else size)


def copying(target: Bytes, source: Bytes) -> Action:
    """Returns the action that copies bytes; with views that are made once, a small copy takes a third of numpy's time."""
    return partial(target.data.__setitem__, slice(None), source.data)


def _reduced(
    ufunc: np.ufunc,
    first: npt.NDArray[np.generic],
    second: npt.NDArray[np.generic],
    rest: Sequence[npt.NDArray[np.generic]],
    into: npt.NDArray[np.generic],
) -> None:
    ufunc(first, second, into)
    for term in rest:
        ufunc(into, term, into)


def _copied(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    for target, source in pairs:
        np.copyto(target, source)
