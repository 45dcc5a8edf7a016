"""The ops of `partc.comm` as ONNX knows ops: their schemas, and a numpy reference that runs over any transport.

With the schemas registered, `onnx.checker` checks a rank file in full, and `onnx.shape_inference` tells what a node alone can
tell: the type, the number of dims, and the dims that do not depend on the number of ranks. With `reference_ops(transport)`,
`onnx.reference.ReferenceEvaluator` executes it, node by node and without onnxruntime: slow, plain, and another witness of
what the file means.

    ReferenceEvaluator(model, new_ops=reference_ops(transport, manifest.circles(rank))).run(None, {"x": x})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx.defs
from onnx import TypeProto, helper
from onnx.defs import OpSchema
from onnx.reference.op_run import OpRun

from ..communication.message import HEADER, Value, decode, encode, payload_size
from ..communication.transport import Transport
from ..execution.tensor import Tensor, aligned
from .comm_node import MANY
from .dtypes import BY_NAME, Array, by_numpy
from .format import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AXIS,
    BROADCAST,
    CONCAT_AXIS,
    DOMAIN,
    DOMAIN_VERSION,
    DTYPE,
    EXCHANGE,
    GROUP,
    ITEMS,
    MAX,
    PEER,
    RANK,
    RANK_CONSTANT,
    RECV,
    RECV_BOXES,
    RECV_PEERS,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_TO,
    ROOT,
    SEND,
    SEND_BOXES,
    SEND_PEERS,
    SHAPE,
    SPLIT_AXIS,
    SUM,
    TAG,
)
from .rank_constants import constant_of

_INT, _INTS, _STRING = OpSchema.AttrType.INT, OpSchema.AttrType.INTS, OpSchema.AttrType.STRING
_STRINGS = OpSchema.AttrType.STRINGS
_ATTRIBUTES = {
    PEER: (_INT, "The rank at the other end."),
    TAG: (_INT, "The number that all nodes of one transfer or collective carry, and no other node."),
    GROUP: (_STRING, "The group of the manifest among whose lists of ranks it happens."),
    REDUCE: (_STRING, "sum, max or min."),
    AXIS: (_INT, "The axis along which shards lie."),
    SPLIT_AXIS: (_INT, "The axis that is split into a shard for each rank."),
    CONCAT_AXIS: (_INT, "The axis along which the shards that come are joined."),
    ROOT: (_INT, "The place in the list of the rank whose value it is."),
    RANK: (_INT, "The number of dims."),
    SEND_PEERS: (_INTS, "The ranks that boxes of the input go to."),
    SEND_BOXES: (_INTS, "For each such box and each dim of the input: begin, end and denominator."),
    RECV_PEERS: (_INTS, "The ranks that boxes of the output come from."),
    RECV_BOXES: (_INTS, "For each such box and each dim of the output: begin, end and denominator."),
    DTYPE: (_INT, "The element type, as onnx.TensorProto numbers it."),
    SHAPE: (_INTS, "The dims; none of a scalar."),
    ITEMS: (_STRINGS, "The items in order: expressions over `place`, the rank's place in its list."),
}
_OPTIONAL = (SHAPE, SEND_PEERS, SEND_BOXES, RECV_PEERS, RECV_BOXES)
_OPS = {
    SEND: ("Sends a value to another rank; the value stays as it is.", (PEER, TAG)),
    RECV: (
        "Receives a value from another rank; its type and shape stand in the graph's value_info.",
        (PEER, TAG),
    ),
    ALL_REDUCE: (
        "The element-wise reduction of the values of all ranks, on every rank; several values of one type travel as one.",
        (GROUP, TAG, REDUCE),
    ),
    ALL_GATHER: ("The values of all ranks joined along an axis, on every rank.", (GROUP, TAG, AXIS)),
    REDUCE_SCATTER: (
        "The element-wise reduction of the values of all ranks, of which each rank gets its shard along an axis.",
        (GROUP, TAG, AXIS, REDUCE),
    ),
    ALL_TO_ALL: (
        "Each rank gives every rank a shard along one axis, and joins what it gets along another.",
        (GROUP, TAG, SPLIT_AXIS, CONCAT_AXIS),
    ),
    REDUCE_TO: ("The element-wise reduction of the values of all ranks, on one rank.", (GROUP, TAG, ROOT, REDUCE)),
    BROADCAST: ("The value of one rank, on every rank.", (GROUP, TAG, ROOT)),
    EXCHANGE: (
        "Boxes of the input go to ranks, and boxes that come from ranks make the output.",
        (GROUP, TAG, RANK, SEND_PEERS, SEND_BOXES, RECV_PEERS, RECV_BOXES),
    ),
    RANK_CONSTANT: (
        "A constant that follows from the rank's place in its list of the group.",
        (GROUP, DTYPE, SHAPE, ITEMS),
    ),
}


def schemas() -> list[OpSchema]:
    """The schemas of all ops of the domain."""
    return [_schema(op, doc, attributes) for op, (doc, attributes) in _OPS.items()]


def register() -> None:
    """Make the schemas known to onnx; a second time changes nothing."""
    for schema in schemas():
        if not onnx.defs.has(schema.name, domain=schema.domain):
            onnx.defs.register_schema(schema)


def _schema(op: str, doc: str, attributes: Sequence[str]) -> OpSchema:
    options = {
        SEND: (OpSchema.FormalParameterOption.Single, None),
        RECV: (None, OpSchema.FormalParameterOption.Single),
        RANK_CONSTANT: (None, OpSchema.FormalParameterOption.Single),
        REDUCE_TO: (OpSchema.FormalParameterOption.Single, OpSchema.FormalParameterOption.Optional),
        BROADCAST: (OpSchema.FormalParameterOption.Optional, OpSchema.FormalParameterOption.Optional),
        EXCHANGE: (OpSchema.FormalParameterOption.Optional, OpSchema.FormalParameterOption.Optional),
        **dict.fromkeys(MANY, (OpSchema.FormalParameterOption.Variadic, OpSchema.FormalParameterOption.Variadic)),
    }
    single = OpSchema.FormalParameterOption.Single
    given, made = options.get(op, (single, single))
    schema = OpSchema(
        op,
        DOMAIN,
        DOMAIN_VERSION,
        doc=doc,
        inputs=[] if given is None else [OpSchema.FormalParameter("X", "T", "The value.", param_option=given)],
        outputs=[] if made is None else [OpSchema.FormalParameter("Y", "T", "The value.", param_option=made)],
        type_constraints=[("T", _types(), "Whatever a value can be.")],
        attributes=[
            OpSchema.Attribute(name, _ATTRIBUTES[name][0], _ATTRIBUTES[name][1], required=name not in _OPTIONAL)
            for name in attributes
        ],
    )
    if given is not None and made is not None:
        schema.set_type_and_shape_inference_function(_infer(op))
    return schema


def _infer(op: str) -> Callable[[Any], None]:
    """What a node alone tells of its output: how many ranks take part stands in the manifest."""

    def infer(context: Any) -> None:
        places = min(context.get_num_inputs(), context.get_num_outputs()) if op in MANY else 1
        for place in range(places):
            infer_one(context, place)

    def infer_one(context: Any, place: int) -> None:
        given = context.get_input_type(place) if context.get_num_inputs() else None
        if given is None or not given.HasField("tensor_type"):
            return
        found = TypeProto()
        found.tensor_type.elem_type = given.tensor_type.elem_type
        if op in (ALL_REDUCE, REDUCE_TO, BROADCAST):
            found.CopyFrom(given)
        elif op == EXCHANGE:
            for _ in range(context.get_attribute(RANK).i):
                found.tensor_type.shape.dim.add()
        elif given.tensor_type.HasField("shape"):
            axes = (AXIS,) if op != ALL_TO_ALL else (SPLIT_AXIS, CONCAT_AXIS)
            dims = given.tensor_type.shape.dim
            changed = {context.get_attribute(name).i % max(len(dims), 1) for name in axes}
            changed = set() if op == ALL_TO_ALL and len(changed) == 1 else changed
            for axis, dim in enumerate(dims):
                made = found.tensor_type.shape.dim.add()
                if axis not in changed:
                    made.CopyFrom(dim)
        if context.get_num_outputs():
            context.set_output_type(place, found)

    return infer


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


def _types() -> list[str]:
    tensors = [f"tensor({name})" for name in (*BY_NAME, "string")]
    sequences = [f"seq({tensor})" for tensor in tensors]
    return [*tensors, *sequences, *(f"optional({one})" for one in (*tensors, *sequences))]
