"""The ops of `partc.comm` in numpy, over any transport: a second definition of the meaning of a rank file, for tests.

`onnx.reference.ReferenceEvaluator` executes a rank file with them node by node, without onnxruntime. A collective sends every value
whole to every rank of the list; what a rank then makes of them follows from the entry (`artifact/comm/collectives.py`).

    ReferenceEvaluator(model, new_ops=reference_ops(transport, manifest.groups_of(rank))).run(None, {"x": x})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import helper
from onnx.reference.op_run import OpRun
from partc.runtime.artifact.comm.collectives import COLLECTIVES, CollectiveOp
from partc.runtime.artifact.format import (
    COPY,
    DOMAIN,
    GIVERS,
    MAX,
    OWNERS,
    PULL,
    PUSH,
    RANK_CONSTANT,
    RECV,
    REDUCE,
    ROOT,
    ROW,
    ROWS,
    SEND,
    SHAPE,
    SUM,
)
from partc.runtime.artifact.graph.rank_constants import constant_of
from partc.runtime.artifact.tensors.boxes import slices, unsharded_extent
from partc.runtime.artifact.tensors.dtypes import Array, by_numpy
from partc.runtime.artifact.tensors.tensor import Tensor, Value, aligned
from partc.runtime.communication.message import HEADER, decode, encode, payload_size
from partc.runtime.communication.transport import Transport


def reference_ops(transport: Transport, groups: Mapping[str, Sequence[int]] | None = None) -> list[type[OpRun]]:
    """All ops for `onnx.reference.ReferenceEvaluator`, over a transport whose other ends run the same reference.

    `groups` gives by group the ranks among which this rank works.
    """
    ends = _Ends(transport, groups or {})
    plain = {SEND: ends.send_node, RECV: ends.receive_node, RANK_CONSTANT: ends.constant, COPY: ends.copy}
    ops = [_op(name, run) for name, run in plain.items()]
    ops += [_op(op.name, _Collective(ends, op)) for op in COLLECTIVES.values()]
    return ops + [_op(name, partial(_looked_up, ends, made)) for name, made in ((PULL, pulled), (PUSH, pushed))]


def collected(op: CollectiveOp, given: Sequence[Array], place: int, a: Mapping[str, Any]) -> Array:
    """The result of one rank: of the values that ranks give, in the list's order, of its place in the list, and of the attributes."""
    if op.root == "gives":
        return given[0]
    values = [np.split(value, len(given), a[op.splits])[place] for value in given] if op.splits else list(given)
    if not op.reduces:
        return np.concatenate(values, a[op.joins])
    total: Any = values[0]
    for value in values[1:]:
        by = a[REDUCE]
        total = total + value if by == SUM else np.maximum(total, value) if by == MAX else np.minimum(total, value)
    return np.asarray(total)


def pulled(given: Sequence[tuple[Any, ...]], place: int, a: Mapping[str, Any]) -> tuple[Any, ...]:
    """The rows that a rank's ids name, of the runs of rows that the owners give; what was asked, by whom, and the ids' places."""
    owners, givers, each = [*a[OWNERS]], [*a.get(GIVERS, ())], a[ROWS] // len(a[OWNERS])
    ids = given[place][1]
    rows = None if ids is None else np.concatenate([given[owner][0] for owner in owners])[ids]
    if not givers:
        return rows, None, None, None
    once = {giver: np.unique(given[giver][1].reshape(-1) % a[ROWS], return_inverse=True) for giver in givers}
    counts = np.zeros(len(owners) + len(givers), np.int64)
    asked = places = None
    if place in givers:
        counts[: len(owners)] = np.bincount(once[place][0] // each, minlength=len(owners))
        places = once[place][1].reshape(ids.shape)
    if place in owners:
        first = owners.index(place) * each
        parts = [one[(first <= one) & (one < first + each)] - first for one, _ in once.values()]
        counts[len(owners) :] = [one.size for one in parts]
        asked = np.concatenate(parts)
    return rows, asked, counts if asked is not None or places is not None else None, places


def pushed(given: Sequence[tuple[Any, ...]], place: int, a: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an owner gets: the ids that it was asked, and of each giver in order the sums of the rows for each."""
    owners = [*a[OWNERS]]
    if place not in owners:
        return None, None
    own, sums = owners.index(place), []
    for giver in a[GIVERS]:
        _, counts, places, rows = given[giver]
        ends = np.cumsum([0, *counts[: len(owners)]])
        total = np.zeros((ends[-1], *a[ROW]), rows.dtype)
        np.add.at(total, places.reshape(-1), rows.reshape(-1, *a[ROW]))
        sums.append(total[ends[own] : ends[own + 1]])
    return given[place][0], np.concatenate(sums)


def _op(name: str, run: Any) -> type[OpRun]:
    """A node's class, which calls `run` with its inputs and attributes."""

    def call(self: OpRun, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        stated = {one.name: helper.get_attribute_value(one) for one in self.onnx_node.attribute}
        texts = {key: value.decode() if isinstance(value, bytes) else value for key, value in stated.items()}
        return tuple(run(*inputs, **texts))

    return type(name, (OpRun,), {"op_domain": DOMAIN, "_run": call})


class _Ends:
    """A rank's end of messages, which wait at once."""

    def __init__(self, transport: Transport, groups: Mapping[str, Sequence[int]]) -> None:
        self.transport, self.groups, self.rank = transport, groups, transport.rank

    def send(self, value: Any, peer: int, tag: int) -> None:
        for part in encode(_as_value(value)):
            self.transport.wait(self.transport.isend(part, peer, tag), lambda: f"Send to rank {peer}")

    def receive(self, peer: int, tag: int) -> Any:
        header = self._received(HEADER, peer, tag)
        value = decode(header, self._received(payload_size(header), peer, tag))
        return value.array() if isinstance(value, Tensor) else value

    def _received(self, size: int, peer: int, tag: int) -> Any:
        buffer = aligned(size)
        self.transport.wait(self.transport.irecv(buffer, peer, tag), lambda: f"Recv from rank {peer}")
        return buffer

    def send_node(self, x: Any, tag: int, peer: int = -1, group: str = "") -> list[Any]:
        self.send(x, self.groups[group][1] if group else peer, tag)
        return [x]  # the evaluator wants a result, and gives it no name

    def receive_node(self, tag: int, peer: int = -1, group: str = "") -> list[Any]:
        return [self.receive(self.groups[group][0] if group else peer, tag)]

    def copy(self, x: Any, to: str) -> list[Any]:
        return [x]

    def constant(self, group: str, dtype: int, items: Sequence[bytes], shape: Sequence[int] = ()) -> list[Any]:
        node = helper.make_node(RANK_CONSTANT, [], ["Y"], group=group, dtype=dtype, items=list(items))
        if shape:
            node.attribute.append(helper.make_attribute(SHAPE, list(shape)))
        return [constant_of(node, list(self.groups[group]).index(self.rank))]


class _Collective:
    """A collective as messages of whole values between all ranks of the list."""

    def __init__(self, ends: _Ends, op: CollectiveOp) -> None:
        self.ends, self.op = ends, op

    def __call__(self, *values: Any, group: str, tag: int, **attributes: Any) -> list[Any]:
        if self.op.boxes:
            return [self._exchange(*values, tag=tag, **attributes)]
        ranks = list(self.ends.groups[group])
        root = ranks[attributes.get(ROOT, 0)]
        givers = [root] if self.op.root == "gives" else ranks
        takers = [root] if self.op.root == "takes" else ranks
        return [self._result(x, ranks, givers, takers, tag, attributes) for x in values or [None]]

    def _result(
        self, x: Any, ranks: list[int], givers: list[int], takers: list[int], tag: int, attributes: Mapping[str, Any]
    ) -> Any:
        ends, rank = self.ends, self.ends.rank
        for peer in takers if rank in givers else ():
            if peer != rank:
                ends.send(x, peer, tag)
        if rank not in takers:
            return x
        given = [x if giver == rank else ends.receive(giver, tag) for giver in givers]
        return collected(self.op, given, ranks.index(rank), attributes)

    def _exchange(
        self,
        x: Any = None,
        *,
        tag: int,
        rank: int,
        send_peers: Sequence[int] = (),
        send_boxes: Sequence[int] = (),
        recv_peers: Sequence[int] = (),
        recv_boxes: Sequence[int] = (),
    ) -> Any:
        kept = []
        for peer, box in _boxes(send_peers, send_boxes, rank):
            shard = x[slices(box, x.shape)]
            if peer == self.ends.rank:
                kept.append(shard)
            else:
                self.ends.send(shard, peer, tag)
        arrived = [
            (box, kept.pop(0) if peer == self.ends.rank else self.ends.receive(peer, tag))
            for peer, box in _boxes(recv_peers, recv_boxes, rank)
        ]
        return _joined(arrived) if arrived else x


def _boxes(peers: Sequence[int], numbers: Sequence[int], rank: int) -> list[tuple[int, list[list[int]]]]:
    cells = np.array(numbers, np.int64).reshape(len(peers), rank, 3).tolist()
    return list(zip(peers, cells, strict=True))


def _joined(shards: Sequence[tuple[list[list[int]], Any]]) -> Any:
    """The value of which these are the boxes."""
    box, shard = shards[0]
    shape = [unsharded_extent(size, cut) for size, cut in zip(shard.shape, box, strict=True)]
    value = np.empty(shape, shard.dtype)
    for box, shard in shards:
        value[slices(box, shape)] = shard
    return value


def _as_value(value: Any) -> Value:
    if value is None:
        return None
    dtype = by_numpy(value.dtype) if isinstance(value, np.ndarray | np.generic) else None
    array: Array = np.asarray(value)
    return Tensor.of(array, dtype) if dtype else value


def _looked_up(ends: _Ends, made: Any, *values: Any, group: str, tag: int, **attributes: Any) -> list[Any]:
    """A lookup: every rank of the list sends all that it gives to every other."""
    ranks, operands = list(ends.groups[group]), [*values, *[None] * 4][:4]
    for peer in ranks:
        for value in operands if peer != ends.rank else ():
            ends.send(value, peer, tag)
    given = [
        tuple(operands) if giver == ends.rank else tuple(ends.receive(giver, tag) for _ in operands) for giver in ranks
    ]
    found = made(given, ranks.index(ends.rank), {ROW: (), **attributes})
    none = next(one for one in operands if one is not None)
    return [none if one is None else one for one in found]  # the evaluator wants results, and gives those no name
