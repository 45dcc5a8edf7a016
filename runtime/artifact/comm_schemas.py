"""The ops of `partc.comm` as ONNX knows ops: their schemas.

With the schemas registered, `onnx.checker` checks a rank file in full, and `onnx.shape_inference` infers what follows from a node alone:
the type, the number of dims, and the dims that do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx.defs
from onnx import TypeProto
from onnx.defs import OpSchema

from .comm_node import MANY
from .dtypes import BY_NAME
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
    TAG,
)

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


def _types() -> list[str]:
    tensors = [f"tensor({name})" for name in (*BY_NAME, "string")]
    sequences = [f"seq({tensor})" for tensor in tensors]
    return [*tensors, *sequences, *(f"optional({one})" for one in (*tensors, *sequences))]
