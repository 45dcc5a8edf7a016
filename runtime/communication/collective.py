"""A collective of one schedule: the copies before it begins and after it is finished, and the scratch memory for them.

A `CollectivePlan` knows the sizes. Bound to memory it is a `BoundCollective`, with the functions that pack, that start the collective, and
that unpack or reduce once the transport is done. It is bound once where its memory stays the same, else in each step. Scratch memory is
part of the arena, as values are: `packed` is in use until the bytes have left, `landing` until they are unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from partc.runtime.artifact.comm.collective_node import CollectiveCall, Shape, place_of, result_shape
from partc.runtime.artifact.tensors.dtypes import BY_NAME, Bytes, Dtype
from partc.runtime.artifact.tensors.tensor import Tensor, aligned

from ..artifact.format import ALL_GATHER, ALL_TO_ALL
from ..errors import RankError, StepError
from .packing import as_moved, is_front, moved_bytes, reduced, split, store, view_as
from .transport import GATHER, CollectiveArgs, Request, Transport

Action: TypeAlias = Callable[[], object]
What: TypeAlias = Callable[[], str]

NOTHING = np.empty(0, np.uint8)
_DIMS = 12
_MISSING = -1
"""Written in place of the number of dims by a rank that has no value."""


@dataclass(frozen=True)
class BoundCollective:
    """A collective bound to memory: `before` packs, `start` begins and returns the request, `after` unpacks the received bytes."""

    start: Callable[[], Request]
    before: Action | None = None
    after: Action | None = None


class CollectivePlan:
    """A collective among `ranks` in which each rank contributes `shape` of `dtype`. `tag` is the tag of the transport's messages."""

    def __init__(
        self, call: CollectiveCall, ranks: tuple[int, ...], shape: Shape, dtype: Dtype, transport: Transport, tag: int
    ) -> None:
        self.call = call
        self.ranks = ranks
        self.shape = shape
        self.dtype = dtype
        self.transport = transport
        self.tag = tag
        self.result = result_shape(call, shape, len(ranks))
        kind = self.kind = call.kind
        self.native = transport.reduces(call.op, ranks, dtype, call.reduce) if kind.reduces else True
        narrow = dtype.bits < 8 and kind.root != "gives"
        self._from, self._into, self.piece = _along(call, shape, len(ranks))
        moved = moved_bytes(dtype, shape)
        alone = len(ranks) == 1
        packs, places = are_copied(call, shape, len(ranks))
        self.packed = moved if not alone and (narrow or packs) else 0
        landed = moved if kind.splits or kind.root == "gives" else moved * len(ranks)
        joins = places or not self.native
        takes = kind.root != "takes" or transport.rank == ranks[call.root]
        self.landing = landed if not alone and takes and (narrow or joins) else 0

    @property
    def gives_shape(self) -> Shape:
        """The shape that each rank contributes."""
        return self.shape

    def bind(
        self, source: Tensor | None, result: Tensor | None, packed: Bytes, landing: Bytes, at_once: bool
    ) -> BoundCollective:
        """Binds the collective to this memory; scratch may be longer than needed. Without a result this rank receives nothing."""
        place = self.ranks.index(self.transport.rank)
        packed, landing = packed[: self.packed], landing[: self.landing]
        if len(self.ranks) == 1 or (self.kind.root == "gives" and place == self.call.root):
            assert source is not None
            before: Action | None = None
            if result is not None and source.pointer != result.pointer:
                before = partial(np.copyto, result.data, source.data)
        else:
            before = self._packing(source, packed) if self.packed and source else None
        if len(self.ranks) == 1:
            return BoundCollective(nothing, before)
        operand = packed if self.packed else source.data if source else NOTHING
        if self.kind.root == "gives":
            result = result or source
            operand = result.data if place == self.call.root and result else NOTHING
        taken = landing if self.landing else result.data if result else NOTHING
        gathered = GATHER if self.kind.root == "takes" else ALL_GATHER
        movement = self.call.op if self.native else ALL_TO_ALL if self.kind.splits else gathered
        args = CollectiveArgs(
            movement,
            self.ranks,
            self.tag,
            operand,
            taken,
            self.dtype,
            self.call.reduce if self.native else "",
            self.call.root,
            at_once,
        )
        after = self._placing(landing, result) if self.landing and result else None
        return BoundCollective(self.transport.prepare(args), before, after)

    def _packing(self, source: Tensor, packed: Bytes) -> Action:
        if not self.kind.splits:
            whole = view_as(packed, self.dtype, self.shape)
            return lambda: np.copyto(whole, as_moved(source))
        pieces = view_as(packed, self.dtype, (len(self.ranks), *self.piece))
        if self.dtype.bits < 8:
            return lambda: np.copyto(pieces, split(as_moved(source), self._from, len(self.ranks)))
        return partial(np.copyto, pieces, split(as_moved(source), self._from, len(self.ranks)))

    def _placing(self, landing: Bytes, result: Tensor) -> Action:
        pieces = view_as(landing, self.dtype, (len(self.ranks), *self.piece))
        if self.kind.reduces:
            return lambda: store(reduced(list(pieces), self.dtype, self.call.reduce), result)
        if self.dtype.bits < 8:
            return lambda: store(np.concatenate(list(pieces), self._into), result)
        return partial(np.copyto, split(as_moved(result), self._into, len(self.ranks)), pieces)


def are_copied(call: CollectiveCall, shape: Shape, ranks: int) -> tuple[bool, bool]:
    """Whether a collective of `shape` copies shards before they are sent, and whether it copies received shards to their places.

    Each is true where the axis of the shards is not the first one, so that a shard is not one block of memory.
    """
    before, behind, piece = _along(call, shape, ranks)
    return not is_front(shape, before), not is_front(piece, behind)


def _along(call: CollectiveCall, shape: Shape, ranks: int) -> tuple[int, int, Shape]:
    """Returns the axis of the split and the axis of the join, each 0 if there is none, and the shape of one rank's shard for another."""
    before = place_of(call.axis, shape) if call.kind.splits else 0
    behind = place_of(call.join_axis, result_shape(call, shape, ranks)) if call.kind.joins else 0
    if not call.kind.splits:
        return before, behind, shape
    return before, behind, (*shape[:before], shape[before] // ranks, *shape[before + 1 :])


def dynamic_collective(
    call: CollectiveCall, ranks: tuple[int, ...], tag: int, source: Tensor, transport: Transport, what: What
) -> Tensor:
    """Returns the result of a collective on values of unknown shape, run from begin to end.

    AllReduce needs equal shapes. AllGather needs shapes that are equal except along `axis`: shorter shards are padded to the longest for
    the message. Shapes that do not fit together raise a StepError on all ranks.
    """
    shapes = _shapes(call, ranks, tag, source, transport, what)
    if call.kind.joins and shapes and len({len(shape) for shape in shapes}) == 1:
        axis = place_of(call.join_axis, source.shape)
        lengths = [shape[axis] for shape in shapes]
        rests = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        fits = len(rests) == 1
    else:
        axis, lengths, fits = 0, [0], len(set(shapes)) == 1
    if not fits:
        told = ", ".join(f"{list(shape)} on rank {rank}" for rank, shape in zip(ranks, shapes, strict=True))
        raise StepError(f"rank {transport.rank} failed in {what()}: the shapes do not fit together: {told}")
    if len(set(lengths)) == 1:
        return _run_at_once(call, ranks, tag, source, transport, what)
    longest = max(lengths)
    wide = list(source.shape)
    wide[axis] = longest
    elements = np.zeros(wide, source.dtype.numpy)
    elements[tuple(slice(size) for size in source.shape)] = source.array()
    filled = Tensor.of(elements, source.dtype)
    everything = _run_at_once(call, ranks, tag, filled, transport, what).array()
    kept = [
        np.take(everything, range(index * longest, index * longest + length), axis)
        for index, length in enumerate(lengths)
    ]
    return Tensor.of(np.concatenate(kept, axis), source.dtype)


def _run_at_once(
    call: CollectiveCall, ranks: tuple[int, ...], tag: int, source: Tensor, transport: Transport, what: What
) -> Tensor:
    work = CollectivePlan(call, ranks, source.shape, source.dtype, transport, tag)
    result = Tensor.empty(source.dtype, work.result)
    bound = work.bind(source, result, aligned(work.packed), aligned(work.landing), False)
    if bound.before:
        bound.before()
    request = bound.start()
    if len(ranks) > 1:
        transport.wait(request, what)
    if bound.after:
        bound.after()
    return result


def _shapes(
    call: CollectiveCall, ranks: tuple[int, ...], tag: int, source: Tensor, transport: Transport, what: What
) -> list[Shape]:
    """Returns the shape of each rank's value; a rank without a value raises a StepError on all ranks."""
    if len(ranks) == 1:
        return [source.shape]
    if len(source.shape) > _DIMS:
        raise RankError(f"{what()}: a value of unknown shape has {len(source.shape)} dims, and {_DIMS} are possible")
    mine = [len(source.shape), *source.shape, *[0] * (_DIMS - len(source.shape))]
    rows = _rows(mine, ranks, tag, transport, what)
    if missing := [rank for rank, row in zip(ranks, rows, strict=True) if row[0] == _MISSING]:
        raise StepError(f"rank {transport.rank} failed in {what()}: rank {missing[0]} has nothing to give")
    return [tuple(row[1 : 1 + row[0]]) for row in rows]


def give_up(call: CollectiveCall, ranks: tuple[int, ...], tag: int, transport: Transport, what: What) -> None:
    """Takes part without a value in a collective on values of unknown shape; the collective then ends with a StepError on all its ranks."""
    if len(ranks) > 1:
        _rows([_MISSING] * (1 + _DIMS), ranks, tag, transport, what)


def _rows(mine: Sequence[int], ranks: tuple[int, ...], tag: int, transport: Transport, what: What) -> list[list[int]]:
    """Returns the numbers of every rank, in the order of `ranks`: an AllGather of `mine`."""
    given = np.array(mine, np.int64)
    rows = np.empty((len(ranks), given.size), np.int64)
    args = CollectiveArgs(
        ALL_GATHER, ranks, tag, given.view(np.uint8), rows.reshape(-1).view(np.uint8), BY_NAME["int64"]
    )
    transport.wait(transport.prepare(args)(), what)
    found: list[list[int]] = rows.tolist()
    return found


def nothing() -> Request:
    """The start of a collective that moves nothing."""
    return None
