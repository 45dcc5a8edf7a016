"""An Exchange of one schedule: boxes of one value become boxes of another, by messages between pairs of ranks.

A box that is contiguous in its value is sent from and received in the value itself; any other box is copied to scratch before it is sent,
or from scratch after it is received. Boxes that stay on a rank are copied at once. The messages of a pair of ranks share a tag and keep
their order.
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
    """A box of a value in memory: its slices, shape and bytes, and its offset in scratch memory, None if it is not copied to scratch."""

    peer: int
    at: tuple[slice, ...]
    shape: Shape
    bytes: int
    scratch: int | None


class Redistribution:
    """One Exchange. `given` and `taken` are the shapes of its input and its output on this rank, None where it has no such value."""

    def __init__(
        self,
        call: CollectiveCall,
        operand: Shape | None,
        taken: Shape | None,
        dtype: Dtype,
        transport: Transport,
        tag: int,
    ) -> None:
        self.call = call
        self.given = operand
        self.taken = taken
        self.dtype = dtype
        self.transport = transport
        self.tag = tag
        self.gives, self.packed = _memory_boxes(call.gives, operand, dtype, transport.rank)
        self.takes, self.landing = _memory_boxes(call.takes, taken, dtype, transport.rank)
        kept = [[part for part in parts if part.peer == transport.rank] for parts in (self.gives, self.takes)]
        if [part.shape for part in kept[0]] != [part.shape for part in kept[1]]:
            raise RankError(f"rank {transport.rank} does not keep the boxes that it gives to itself")
        # the k-th box that a rank sends to itself is the k-th that it receives
        self._keeps = list(zip(*kept, strict=True))

    @property
    def gives_shape(self) -> Shape:
        """The shape of this rank's input; () where it has none."""
        return self.given or ()

    def begin(
        self, source: Tensor | None, result: Tensor | None, packed: Bytes, landing: Bytes
    ) -> tuple[list[Request], list[Request], Callable[[], None]]:
        """Posts the receives, sends, and copies the boxes that stay here.

        Returns the requests of the sends, those of the receives, and a function to call when all have arrived: it copies boxes out of
        scratch.
        """
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
        """Returns a box's memory as elements and as bytes: in scratch, or in the value itself where the box is contiguous."""
        if part.scratch is None:
            inside = value[part.at]
            return inside, inside.reshape(-1).view(np.uint8)
        data = scratch[part.scratch :][: part.bytes]
        return view_as(data, self.dtype, part.shape), data


def _memory_boxes(
    shards: Sequence[PeerBox], shape: Shape | None, dtype: Dtype, rank: int
) -> tuple[list[MemoryBox], int]:
    """Returns the boxes of a value of `shape` in memory, and the bytes of scratch memory that they need."""
    boxes: list[MemoryBox] = []
    scratch = 0
    for shard in shards:
        assert shape is not None
        at = slices(shard.box, shape)
        size = tuple(one.stop - one.start for one in at)
        count = moved_bytes(dtype, size)
        # a box is one block of memory if all dims after its first dim of more than 1 are whole
        first = next((axis for axis, extent in enumerate(size) if extent != 1), len(size))
        inside = dtype.bits >= 8 and size[first + 1 :] == shape[first + 1 :]
        kept = shard.peer == rank or inside
        boxes.append(MemoryBox(shard.peer, at, size, count, None if kept else scratch))
        scratch += 0 if kept else -(-count // 64) * 64
    return boxes, scratch
