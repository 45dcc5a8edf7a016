"""An Exchange of one schedule: boxes of one value become boxes of another, over messages between pairs of ranks.

A box that is contiguous in its value travels from there and to there; another is copied into scratch before, or out of it after.
What a rank keeps is copied at once. The messages of a pair have one tag and keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from partc.runtime.artifact.comm.collective_node import CollectiveCall, PeerBox, Shape
from partc.runtime.artifact.tensors.boxes import slices
from partc.runtime.artifact.tensors.dtypes import Array, Bytes, Dtype
from partc.runtime.artifact.tensors.tensor import Tensor

from ..errors import RankError
from .packing import as_moved, moved_bytes, store, view_as
from .transport import Request, Transport


@dataclass(frozen=True)
class MemoryBox:
    """A box in the memory of a value: where in it, how large, and where its bytes lie in scratch; None if not there."""

    peer: int
    at: tuple[slice, ...]
    shape: Shape
    bytes: int
    scratch: int | None


class Redistribution:
    """One Exchange: `given` and `taken` are the shapes of its input and output on this rank, None where there is none."""

    def __init__(
        self,
        call: CollectiveCall,
        given: Shape | None,
        taken: Shape | None,
        dtype: Dtype,
        transport: Transport,
        tag: int,
    ) -> None:
        self.call = call
        self.given = given
        self.taken = taken
        self.dtype = dtype
        self.transport = transport
        self.tag = tag
        self.gives, self.packed = _memory_boxes(call.gives, given, dtype, transport.rank)
        self.takes, self.landing = _memory_boxes(call.takes, taken, dtype, transport.rank)
        kept = [[part for part in parts if part.peer == transport.rank] for parts in (self.gives, self.takes)]
        if [part.shape for part in kept[0]] != [part.shape for part in kept[1]]:
            raise RankError(f"rank {transport.rank} does not keep the boxes that it gives to itself")
        self._keeps = list(zip(*kept, strict=True))  # the k-th box given to itself is the k-th taken from itself

    @property
    def gives_shape(self) -> Shape:
        """The shape of what this rank gives."""
        return self.given or ()

    def begin(
        self, source: Tensor | None, result: Tensor | None, packed: Bytes, landing: Bytes
    ) -> tuple[list[Request], list[Request], Callable[[], None]]:
        """Post, send and keep: the requests of what leaves, those of what comes, and what to do when it has come."""
        transport, rank, tag = self.transport, self.transport.rank, self.tag
        target: Array | None = None
        if result is not None:
            target = np.empty(result.shape, np.uint8) if result.dtype.bits < 8 else as_moved(result)
        coming: list[Request] = []
        later: list[tuple[Array, Array]] = []
        if target is not None:
            for part in self.takes:
                if part.peer != rank:
                    place, data = self._memory(part, target, landing)
                    coming.append(transport.irecv(data, part.peer, tag))
                    if part.scratch is not None:
                        later.append((target[part.at], place))
        leaving: list[Request] = []
        if source is not None:
            elements = as_moved(source)
            for part in self.gives:
                if part.peer != rank:
                    place, data = self._memory(part, elements, packed)
                    if part.scratch is not None:
                        np.copyto(place, elements[part.at])
                    leaving.append(transport.isend(data, part.peer, tag))
            for give, take in self._keeps:
                assert target is not None
                np.copyto(target[take.at], elements[give.at])

        def finish() -> None:
            for place, arrived in later:
                np.copyto(place, arrived)
            if target is not None and result is not None and self.dtype.bits < 8:
                store(target, result)

        return leaving, coming, finish

    def _memory(self, part: MemoryBox, value: Array, scratch: Bytes) -> tuple[Array, Bytes]:
        """Where a part's bytes lie outside of the value, or in it where they are contiguous: as elements and as bytes."""
        if part.scratch is None:
            inside = value[part.at]
            return inside, inside.reshape(-1).view(np.uint8)
        data = scratch[part.scratch :][: part.bytes]
        return view_as(data, self.dtype, part.shape), data


def _memory_boxes(
    shards: Sequence[PeerBox], shape: Shape | None, dtype: Dtype, rank: int
) -> tuple[list[MemoryBox], int]:
    """The parts of a value, and the bytes of the scratch that they need."""
    found: list[MemoryBox] = []
    scratch = 0
    for shard in shards:
        assert shape is not None
        at = slices(shard.box, shape)
        size = tuple(one.stop - one.start for one in at)
        count = moved_bytes(dtype, size)
        # one block of memory: below the first dim of more than 1 it is whole
        first = next((axis for axis, extent in enumerate(size) if extent != 1), len(size))
        inside = dtype.bits >= 8 and size[first + 1 :] == shape[first + 1 :]
        kept = shard.peer == rank or inside
        found.append(MemoryBox(shard.peer, at, size, count, None if kept else scratch))
        scratch += 0 if kept else -(-count // 64) * 64
    return found, scratch
