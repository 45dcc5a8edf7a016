"""The ops of `partc.comm` in numpy, over any transport: a second witness of what a rank file means, for tests.

`onnx.reference.ReferenceEvaluator` executes a rank file with them node by node, without onnxruntime:

    ReferenceEvaluator(model, new_ops=reference_ops(transport, manifest.circles(rank))).run(None, {"x": x})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper
from onnx.reference.op_run import OpRun

from ..artifact.dtypes import Array, by_numpy
from ..artifact.format import DOMAIN, MAX, RANK_CONSTANT, SHAPE, SUM
from ..artifact.rank_constants import constant_of
from ..artifact.tensor import Tensor, Value, aligned
from .message import HEADER, decode, encode, payload_size
from .transport import Transport


def reference_ops(transport: Transport, circles: Mapping[str, Sequence[int]] | None = None) -> list[type[OpRun]]:
    """All ops for `onnx.reference.ReferenceEvaluator`, over a transport whose other ends run the same reference.

    `circles` gives by group the ranks among which this rank works.
    """

    def send(value: Any, peer: int, tag: int) -> None:
        for part in encode(_sent(value)):
            transport.wait(transport.isend(part, peer, tag), lambda: f"Send to rank {peer}")

    def receive(peer: int, tag: int) -> Any:
        def received(size: int) -> Any:
            buffer = aligned(size)
            transport.wait(transport.irecv(buffer, peer, tag), lambda: f"Recv from rank {peer}")
            return buffer

        header = received(HEADER)
        value = decode(header, received(payload_size(header)))
        return value.array() if isinstance(value, Tensor) else value

    def ranks_of(group: str) -> Sequence[int]:
        return (circles or {})[group]

    def everyone(x: Any, group: str, tag: int) -> list[Any]:
        """The values of all ranks of the list."""
        peers = [rank for rank in ranks_of(group) if rank != transport.rank]
        for peer in peers:
            send(x, peer, tag)
        return [x if rank == transport.rank else receive(rank, tag) for rank in ranks_of(group)]

    class RankConstant(OpRun):
        op_domain = DOMAIN

        def _run(
            self, group: str = "", dtype: int = 0, shape: Sequence[int] = (), items: Sequence[str] = ()
        ) -> tuple[Any]:
            node = helper.make_node(RANK_CONSTANT, [], ["Y"], group=group, dtype=dtype, items=list(items))
            if shape:
                node.attribute.append(helper.make_attribute(SHAPE, list(shape)))
            return (constant_of(node, ranks_of(group).index(transport.rank)),)

    class Send(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any, peer: int = 0, tag: int = 0) -> tuple[Any]:
            send(x, peer, tag)
            # The evaluator wants a result, and gives it no name.
            return (x,)

    class Recv(OpRun):
        op_domain = DOMAIN

        def _run(self, peer: int = 0, tag: int = 0) -> tuple[Any]:
            return (receive(peer, tag),)

    class AllReduce(OpRun):
        op_domain = DOMAIN

        def _run(self, *values: Any, group: str = "", tag: int = 0, reduce: str = SUM) -> tuple[Any, ...]:
            return tuple(_reduced(everyone(x, group, tag), reduce) for x in values)

    class AllGather(OpRun):
        op_domain = DOMAIN

        def _run(self, *values: Any, group: str = "", tag: int = 0, axis: int = 0) -> tuple[Any, ...]:
            return tuple(np.concatenate(everyone(x, group, tag), axis) for x in values)

    class ReduceScatter(OpRun):
        op_domain = DOMAIN

        def _run(
            self, *values: Any, group: str = "", tag: int = 0, axis: int = 0, reduce: str = SUM
        ) -> tuple[Any, ...]:
            ranks = ranks_of(group)
            sums = [_reduced(everyone(x, group, tag), reduce) for x in values]
            return tuple(np.split(one, len(ranks), axis)[ranks.index(transport.rank)] for one in sums)

    class AllToAll(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any, group: str = "", tag: int = 0, split_axis: int = 0, concat_axis: int = 0) -> tuple[Any]:
            ranks = ranks_of(group)
            place = ranks.index(transport.rank)
            mine = [np.split(value, len(ranks), split_axis)[place] for value in everyone(x, group, tag)]
            return (np.concatenate(mine, concat_axis),)

    class Reduce(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any, group: str = "", tag: int = 0, root: int = 0, reduce: str = SUM) -> tuple[Any]:
            ranks = ranks_of(group)
            if ranks[root] != transport.rank:
                send(x, ranks[root], tag)
                return (x,)
            return (_reduced([x if rank == transport.rank else receive(rank, tag) for rank in ranks], reduce),)

    class Broadcast(OpRun):
        op_domain = DOMAIN

        def _run(self, x: Any = None, group: str = "", tag: int = 0, root: int = 0) -> tuple[Any]:
            owner = ranks_of(group)[root]
            if owner != transport.rank:
                return (receive(owner, tag),)
            for peer in ranks_of(group):
                if peer != owner:
                    send(x, peer, tag)
            return (x,)

    class Exchange(OpRun):
        op_domain = DOMAIN

        def _run(
            self,
            x: Any = None,
            group: str = "",
            tag: int = 0,
            rank: int = 0,
            send_peers: Sequence[int] | None = None,
            send_boxes: Sequence[int] | None = None,
            recv_peers: Sequence[int] | None = None,
            recv_boxes: Sequence[int] | None = None,
        ) -> tuple[Any]:
            kept = []
            for peer, box in _boxes(send_peers, send_boxes, rank):
                shard = x[
                    tuple(
                        slice(size * begin // of, size * end // of)
                        for size, (begin, end, of) in zip(x.shape, box, strict=True)
                    )
                ]
                if peer == transport.rank:
                    kept.append(shard)
                else:
                    send(shard, peer, tag)
            arrived = [
                (box, kept.pop(0) if peer == transport.rank else receive(peer, tag))
                for peer, box in _boxes(recv_peers, recv_boxes, rank)
            ]
            return (_joined(arrived) if arrived else x,)

    return [RankConstant, Send, Recv, AllReduce, AllGather, ReduceScatter, AllToAll, Reduce, Broadcast, Exchange]


def _reduced(values: Sequence[Any], reduce: str) -> Any:
    total = values[0]
    for value in values[1:]:
        total = (
            total + value if reduce == SUM else np.maximum(total, value) if reduce == MAX else np.minimum(total, value)
        )
    return total


def _boxes(
    peers: Sequence[int] | None, numbers: Sequence[int] | None, rank: int
) -> list[tuple[int, list[tuple[int, int, int]]]]:
    cells = np.array(numbers or [], np.int64).reshape(len(peers or []), rank, 3).tolist()
    return [(peer, [(begin, end, of) for begin, end, of in box]) for peer, box in zip(peers or [], cells, strict=True)]


def _joined(shards: Sequence[tuple[list[tuple[int, int, int]], Any]]) -> Any:
    """The value of which these are the boxes."""
    box, shard = shards[0]
    shape = [size * of // (end - begin) for size, (begin, end, of) in zip(shard.shape, box, strict=True)]
    value = np.empty(shape, shard.dtype)
    for box, shard in shards:
        at = tuple(
            slice(size * begin // of, size * end // of) for size, (begin, end, of) in zip(shape, box, strict=True)
        )
        value[at] = shard
    return value


def _sent(value: Any) -> Value:
    dtype = by_numpy(value.dtype) if isinstance(value, np.ndarray | np.generic) else None
    array: Array = np.asarray(value)
    return Tensor.of(array, dtype) if dtype else value
