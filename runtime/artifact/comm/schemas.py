"""The ONNX schemas of the ops of `partc.comm`.

With the schemas registered, `onnx.checker` checks a rank file in full, and `onnx.shape_inference` infers the facts that depend on a node
alone: the type, the number of dims, and the dims that do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx.defs
from onnx import TensorProto, TypeProto
from onnx.defs import OpSchema
from partc.runtime.artifact.comm.collectives import (
    AMONG,
    BODIES,
    COLLECTIVES,
    GROUP_OPS,
    LOOKUPS,
    NUMBER,
    Attribute,
    CollectiveOp,
    GroupOp,
)
from partc.runtime.artifact.format import (
    COPY,
    DOMAIN,
    DOMAIN_VERSION,
    DTYPE,
    GROUP,
    ITEMS,
    PEER,
    PULL,
    PUSH,
    RANK,
    RANK_CONSTANT,
    RECV,
    RETURN,
    ROUTE,
    ROW,
    SEND,
    SHAPE,
    TARGETS,
    TO,
)
from partc.runtime.artifact.tensors.dtypes import BY_NAME

_TYPES = {
    "int": OpSchema.AttrType.INT,
    "ints": OpSchema.AttrType.INTS,
    "string": OpSchema.AttrType.STRING,
    "strings": OpSchema.AttrType.STRINGS,
}
_ONE, _MAYBE, _MANY = (
    OpSchema.FormalParameterOption.Single,
    OpSchema.FormalParameterOption.Optional,
    OpSchema.FormalParameterOption.Variadic,
)
_TO = Attribute(PEER, "int", "The rank at the other end.", False)
_PAIRS = Attribute(
    GROUP, "string", "In place of the peer: pairs of source and target, of which the rank is in one.", False
)
_WHERE = Attribute(TO, "string", f"The target on which the value then lies: {', '.join(TARGETS)}.")
_CONSTANT = (
    AMONG,
    Attribute(DTYPE, "int", "The element type, as onnx.TensorProto numbers it."),
    Attribute(SHAPE, "ints", "The dims; none of a scalar.", False),
    Attribute(ITEMS, "strings", "The items in order: expressions over `place`, the rank's place in its list."),
)


def schemas() -> list[OpSchema]:
    """Returns the schemas of all ops of the domain."""
    sends = "Sends a value to another rank; the value stays as it is."
    receives = "Receives a value from another rank; its type and shape stand in the graph's value_info."
    follows = "A constant that follows from the rank's place in its list of the group."
    return [
        _schema(SEND, sends, (_TO, _PAIRS, NUMBER), _ONE, None),
        _schema(RECV, receives, (_TO, _PAIRS, NUMBER), None, _ONE),
        _schema(RANK_CONSTANT, follows, _CONSTANT, None, _ONE),
        _copy(),
        *(_collective(op) for op in COLLECTIVES.values()),
        *(_lookup(op) for op in LOOKUPS.values()),
        *(_border(op) for op in BODIES.values()),
    ]


def register() -> None:
    """Registers the schemas with onnx; a second call changes nothing."""
    names = (SEND, RECV, RANK_CONSTANT, COPY, *GROUP_OPS)
    if all(onnx.defs.has(name, domain=DOMAIN) for name in names):
        return  # schemas() makes all of them anew, which takes longer than the check of a small file
    for schema in schemas():
        if not onnx.defs.has(schema.name, domain=schema.domain):
            onnx.defs.register_schema(schema)


def _copy() -> OpSchema:
    def infer(context: Any) -> None:
        if (given := context.get_input_type(0)) is not None:
            context.set_output_type(0, given)

    schema = _schema(COPY, "The value on another of the rank's targets.", (_WHERE,), _ONE, _ONE)
    schema.set_type_and_shape_inference_function(infer)
    return schema


def _border(op: GroupOp) -> OpSchema:
    """The schema of a border of a body: values of any types."""
    option = OpSchema.FormalParameterOption.Variadic
    input_values, output_values = (
        OpSchema.FormalParameter(name, "T", "Values.", param_option=option, is_homogeneous=False, min_arity=0)
        for name in "XY"
    )
    return OpSchema(
        op.name,
        DOMAIN,
        DOMAIN_VERSION,
        doc=op.doc,
        inputs=[input_values],
        outputs=[output_values],
        type_constraints=[("T", _types(), "Whatever a value can be.")],
        attributes=[_attribute(one) for one in op.every_attribute],
    )


def _collective(op: CollectiveOp) -> OpSchema:
    given = _MANY if op.coalesces else _MAYBE if op.boxes or op.root == "gives" else _ONE
    made = _MANY if op.coalesces else _MAYBE if op.boxes or op.root else _ONE
    schema = _schema(op.name, op.doc, op.every_attribute, given, made)
    schema.set_type_and_shape_inference_function(_infer(op))
    return schema


def _lookup(op: GroupOp) -> OpSchema:
    """The schema of a lookup."""

    def formal(name: str, doc: str, type: str = "tensor(int64)") -> OpSchema.FormalParameter:
        return OpSchema.FormalParameter(name, type, doc, param_option=_MAYBE)

    table = formal("table", "The rank's run of the table's rows.", "T")
    ids = formal("ids", "Numbers of rows; one below 0 counts from the end.", "I")
    asked = [
        formal("asked", "Numbers of own rows that givers ask for, giver by giver, each giver's once."),
        formal("counts", "How many ids are asked of each owner, and how many each giver asks of this one."),
        formal("places", "By id its place among the rank's own ids, each once."),
    ]
    own_ids, rows = formal("own_ids", "Numbers of own rows: asked."), formal("Y", "A row for each id.", "T")
    leaving, coming = formal("X", "The rows that leave.", "T"), formal("Y", "The rows that come.", "T")
    experts = formal("experts", "By row its expert.", "I")
    own_experts = formal("own_experts", "By row that comes its expert, counted from the rank's first.")
    sent = [
        formal("sent", "By row its place among those that leave."),
        formal("counts", "How many rows leave for each rank, and how many come from each."),
    ]
    ends, infer = {
        PULL: (([table, ids], [rows, *asked]), _infer_pull),
        PUSH: (([*asked, formal("dY", "A row for each id.", "T")], [own_ids, rows]), _infer_push),
        ROUTE: (([leaving, experts, *sent], [coming, own_experts, *sent]), _infer_route),
        RETURN: (([leaving, *sent], [coming]), _infer_return),
    }[op.name]
    schema = OpSchema(
        op.name,
        DOMAIN,
        DOMAIN_VERSION,
        doc=op.doc,
        inputs=ends[0],
        outputs=ends[1],
        type_constraints=[
            ("T", _types(), "Whatever a row can be of."),
            *([("I", ["tensor(int32)", "tensor(int64)"], "Ids.")] if op.name in (PULL, ROUTE) else []),
        ],
        attributes=[_attribute(one) for one in op.every_attribute],
    )
    schema.set_type_and_shape_inference_function(infer)
    return schema


def _infer_pull(context: Any) -> None:
    """Infers a row of the table, whose shape the node states, for each id; the number of an owner's requests is known only at run time."""
    table, ids = (context.get_input_type(at) if context.get_num_inputs() > at else None for at in range(2))
    shape = ids.tensor_type.shape if ids is not None and ids.tensor_type.HasField("shape") else None
    if table is not None and table.HasField("tensor_type") and context.get_num_outputs():
        inferred = TypeProto()
        inferred.tensor_type.elem_type = table.tensor_type.elem_type
        if shape is not None:
            inferred.tensor_type.shape.CopyFrom(shape)
            for size in _row(context):
                inferred.tensor_type.shape.dim.add(dim_value=size)
        context.set_output_type(0, inferred)
    for at in range(1, context.get_num_outputs()):
        numbers = TypeProto()
        numbers.tensor_type.elem_type = TensorProto.INT64
        if at < 3:
            numbers.tensor_type.shape.dim.add()
        elif shape is not None:
            numbers.tensor_type.shape.CopyFrom(shape)
        context.set_output_type(at, numbers)


def _infer_push(context: Any) -> None:
    """Infers ids and rows, whose number is known only at run time."""
    rows = context.get_input_type(3) if context.get_num_inputs() > 3 else None
    if not context.get_num_outputs():
        return
    numbers = TypeProto()
    numbers.tensor_type.elem_type = TensorProto.INT64
    numbers.tensor_type.shape.dim.add()
    context.set_output_type(0, numbers)
    if rows is not None and rows.HasField("tensor_type") and context.get_num_outputs() > 1:
        found = TypeProto()
        found.tensor_type.elem_type = rows.tensor_type.elem_type
        found.tensor_type.shape.dim.add()
        for size in _row(context):
            found.tensor_type.shape.dim.add(dim_value=size)
        context.set_output_type(1, found)


def _infer_route(context: Any) -> None:
    """Infers rows and their experts, whose number is known only at run time."""
    _give_rows(context, None)
    ids = context.get_input_type(1) if context.get_num_inputs() > 1 else None
    for at in range(1, context.get_num_outputs()):
        numbers = TypeProto()
        numbers.tensor_type.elem_type = TensorProto.INT64
        if at == 2 and ids is not None and ids.tensor_type.HasField("shape"):
            numbers.tensor_type.shape.CopyFrom(ids.tensor_type.shape)
        else:
            numbers.tensor_type.shape.dim.add()
        context.set_output_type(at, numbers)


def _infer_return(context: Any) -> None:
    """Infers a row for each place."""
    _give_rows(context, context.get_input_type(1) if context.get_num_inputs() > 1 else None)


def _give_rows(context: Any, places: Any) -> None:
    """Sets the type of rows, of the shape that the node states, one for each of the places."""
    rows = context.get_input_type(0) if context.get_num_inputs() else None
    if rows is None or not rows.HasField("tensor_type") or not context.get_num_outputs():
        return
    inferred = TypeProto()
    inferred.tensor_type.elem_type = rows.tensor_type.elem_type
    if places is not None and places.tensor_type.HasField("shape"):
        inferred.tensor_type.shape.CopyFrom(places.tensor_type.shape)
    else:
        inferred.tensor_type.shape.dim.add()
    for size in _row(context):
        inferred.tensor_type.shape.dim.add(dim_value=size)
    context.set_output_type(0, inferred)


def _row(context: Any) -> Sequence[int]:
    said = context.get_attribute(ROW)
    return list(said.ints) if said is not None else []


def _attribute(one: Attribute) -> OpSchema.Attribute:
    return OpSchema.Attribute(one.name, _TYPES[one.type], one.doc, required=one.required)


def _schema(
    name: str,
    doc: str,
    attributes: Sequence[Attribute],
    input_option: OpSchema.FormalParameterOption | None,
    output_option: OpSchema.FormalParameterOption | None,
) -> OpSchema:
    return OpSchema(
        name,
        DOMAIN,
        DOMAIN_VERSION,
        doc=doc,
        inputs=[]
        if input_option is None
        else [OpSchema.FormalParameter("X", "T", "The value.", param_option=input_option)],
        outputs=[]
        if output_option is None
        else [OpSchema.FormalParameter("Y", "T", "The value.", param_option=output_option)],
        type_constraints=[("T", _types(), "Whatever a value can be.")],
        attributes=[_attribute(one) for one in attributes],
    )


def _infer(op: CollectiveOp) -> Callable[[Any], None]:
    """Returns the inference of the output from the node alone: the number of ranks is only in the manifest."""

    def infer(context: Any) -> None:
        places = min(context.get_num_inputs(), context.get_num_outputs()) if op.coalesces else 1
        for place in range(places):
            infer_one(context, place)

    def infer_one(context: Any, place: int) -> None:
        operand = context.get_input_type(place) if context.get_num_inputs() else None
        if operand is None or not operand.HasField("tensor_type"):
            return
        inferred = TypeProto()
        inferred.tensor_type.elem_type = operand.tensor_type.elem_type
        if op.boxes:
            for _ in range(context.get_attribute(RANK).i):
                inferred.tensor_type.shape.dim.add()
        elif operand.tensor_type.HasField("shape"):
            dims = operand.tensor_type.shape.dim
            axes = [context.get_attribute(name).i % max(len(dims), 1) for name in (op.splits, op.joins) if name]
            for axis, dim in enumerate(dims):
                made = inferred.tensor_type.shape.dim.add()
                if axes.count(axis) != 1:  # an axis that is split and joined again keeps its size
                    made.CopyFrom(dim)
        if context.get_num_outputs():
            context.set_output_type(place, inferred)

    return infer


def _types() -> list[str]:
    tensors = [f"tensor({name})" for name in (*BY_NAME, "string")]
    sequences = [f"seq({tensor})" for tensor in tensors]
    return [*tensors, *sequences, *(f"optional({one})" for one in (*tensors, *sequences))]
