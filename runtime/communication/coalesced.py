"""A ReduceScatter or AllGather of several values as one message: the values are packed one after another, and unpacked on arrival.

All values are sharded along axis 0, where the shards of a value follow each other. For values a and b and ranks 0 and 1:

    ReduceScatter   [a0 a1] [b0 b1]   --packed-->   [a0 b0 | a1 b1]   --reduced-->    rank 0 has [a0 b0]
    AllGather       [a0] [b0]         --packed-->   [a0 b0]           --gathered-->   [a0 b0 | a1 b1]   --unpacked-->   [a0 a1] [b0 b1]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from partc.runtime.artifact.comm.collective_node import CollectiveCall
from partc.runtime.artifact.tensors.dtypes import Bytes, Dtype
from partc.runtime.artifact.tensors.tensor import Tensor

from .collective import Action, BoundCollective, CollectivePlan
from .transport import Transport


class CoalescedCollective:
    """A collective among `ranks` of several values of `dtype`; `sizes` are the bytes of each value that a rank contributes."""

    def __init__(
        self,
        call: CollectiveCall,
        ranks: tuple[int, ...],
        sizes: Sequence[int],
        dtype: Dtype,
        transport: Transport,
        tag: int,
    ) -> None:
        self.call, self.ranks, self.sizes = call, ranks, list(sizes)
        self.input_bytes = sum(self.sizes)
        elements = self.input_bytes * 8 // dtype.bits
        flat = CollectiveCall(call.op, call.group, call.tag, call.path, "packed", "landing", call.reduce)
        self.work = CollectivePlan(flat, ranks, (elements,), dtype, transport, tag)
        self.output_bytes = dtype.bytes_of(self.work.result)
        self.packed = self.input_bytes
        self.landing = self.output_bytes + self.work.landing
        assert not call.in_one_buffer
        assert not self.work.packed

    def bind(
        self, sources: Sequence[Tensor], results: Sequence[Tensor], packed: Bytes, landing: Bytes, at_once: bool
    ) -> BoundCollective:
        """Binds the collective to this memory."""
        dtype, count = self.work.dtype, len(self.ranks)
        gathers = bool(self.call.kind.joins)
        whole, own = Tensor(dtype, self.work.shape, packed[: self.input_bytes]), landing[: self.output_bytes]
        flat = Tensor(dtype, self.work.result, own)
        bound = self.work.bind(whole, flat, landing[:0], landing[self.output_bytes : self.landing], at_once)
        before = partial(
            _copy, _rows([one.data for one in sources], packed[: self.input_bytes], 1 if gathers else count)
        )
        after = partial(_copy, _rows([one.data for one in results], own, count if gathers else 1, apart=True))
        return BoundCollective(bound.start, partial(_all, before, bound.before), partial(_all, bound.after, after))


def _rows(values: Sequence[Bytes], together: Bytes, ranks: int, apart: bool = False) -> list[tuple[Bytes, Bytes]]:
    """Returns pairs of memory (source, target) that pack `values` into `together`; with `apart`, those that unpack it.

    `ranks` is the number of rows of `together`; each row has one rank's shards of all values, one after another.
    """
    row, at = len(together) // ranks, 0
    table = together.reshape(ranks, row)
    pairs = []
    for value in values:
        size = len(value) // ranks
        pair = value.reshape(ranks, size), table[:, at : at + size]
        pairs.append(pair[::-1] if apart else pair)
        at += size
    return pairs


def _copy(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    for source, target in pairs:
        np.copyto(target, source)


def _all(*actions: Action | None) -> None:
    for action in actions:
        if action is not None:
            action()
