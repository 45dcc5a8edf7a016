"""Messages that send tokens' rows to the ranks of their experts and back: Route at the entry of an expert region, Return at its exit.

    ToExperts on 0-3, e (0,), m (0,)       %rows', %experts', %sent, %counts = Route(%rows, %experts)
                                backward   %rows.grad = Return(%rows'.grad, %sent, %counts)
    FromExperts                            %y = Return(%y', %sent, %counts)
                                backward   %y'.grad = Route(%y.grad, , %sent, %counts)

Route and Return are each other's transpose, so all four use the counts that the first Route has sent. A set of the process group lists the
ranks that share the experts, in the order of their runs of experts.
"""

from __future__ import annotations

import math
from fractions import Fraction

import onnx_ir as ir
import sympy
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.programs import Comm, Event, Value
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.masked_replicas import operand
from partc.compiler.ops.families.neural.expert_rows import TO_EXPERTS
from partc.compiler.sharding.values.operands import input_layout_of, output_layout_of
from partc.runtime.artifact import format as fmt

_NUMBERS = ir.TensorType(ir.DataType.INT64)


def write_route(comm: CommLowering, instance: NodeOnGroup) -> None:
    """Writes the Route or the Return of a border node (ToExperts, FromExperts) on a group."""
    node, group, program = instance.node, instance.group, comm.program
    read, output = input_layout_of(program, instance, 0), output_layout_of(program, instance, 0)
    rows, out = operand(comm, instance, 0), comm.values.at[output]
    assert rows is not None
    if node.op_type != TO_EXPERTS:
        _write(comm, instance, fmt.RETURN, (rows, out), (read, output))
        return
    experts = output_layout_of(program, instance, 1)
    sets = _sets(comm, instance)[0]
    sent, counts = (comm.job.derived_on(group, out, f".{word}") for word in ("sent", "counts"))
    shape = comm.values.local_shape(input_layout_of(program, instance, 1))
    for value, own in ((sent, shape), (counts, (2 * len(sets[0]),))):
        of = ir.Value(name=str(value), type=_NUMBERS, shape=None if own is None else ir.Shape(own))
        comm.values.add(of, ValueInfo("tensor(int64)", own, 8))
        comm.job.declare(group, value, of, own)
    op = _write(
        comm,
        instance,
        fmt.ROUTE,
        (rows, out),
        (read, output),
        (operand(comm, instance, 1),),
        (comm.values.at[experts], sent, counts),
    )
    comm.declare(experts, comm.values.at[experts])
    comm.pulls[instance] = ((op, group),)


def write_dual(
    comm: CommLowering, instance: NodeOnGroup, values: tuple[Value, Value], of: tuple[ShardedValue, ShardedValue]
) -> None:
    """Writes the gradient of a border's Route or Return, which is the other of the two.

    `values`: the cotangents of the border's output and of its rows. `of`: their sharded values.
    """
    _write(comm, instance, fmt.RETURN if instance.node.op_type == TO_EXPERTS else fmt.ROUTE, values, of)


def _sets(comm: CommLowering, instance: NodeOnGroup) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The sets of ranks that share the experts of a border, and the name of the process group."""
    choice = comm.program.choices[instance]
    return comm.subgroups(choice.mesh, choice.axes[choice.pulled], instance.group)


def _write(
    comm: CommLowering,
    instance: NodeOnGroup,
    op_type: str,
    values: tuple[Value, Value],
    of: tuple[ShardedValue, ShardedValue],
    ids: tuple[Value | None, ...] = (),
    more: tuple[Value, ...] = (),
) -> Comm:
    """Writes a Route or a Return that reads the first of `values` and makes the second.

    `ids`: further inputs (the experts of the rows). `more`: further outputs (the places sent, the counts).
    """
    program, node = comm.program, instance.node
    border = node if node.op_type == TO_EXPERTS else node.inputs[1].producer() if node.inputs[1] is not None else None
    assert border is not None
    sets, group = _sets(comm, instance)
    version = input_layout_of(program, NodeOnGroup(border, instance.group), 1)
    shape, info = comm.values.local_shape(version), comm.values[of[0].value]
    row = tuple([dim for dim in (of[0].value.shape or ())[1:] if isinstance(dim, int)])
    amount = _bytes(shape, math.prod(row) * (info.item_bytes or 1), len(sets[0]))
    cause = f"rows for the experts of '{program.paths[border].rpartition('.route')[0]}'"
    tag, way = len(comm.events), tuple((one.group, one.layout) for one in of)
    comm.events.append(
        Event(tag, op_type, of[1].value, values[1], sets, group, shape, amount, cause, way=(way[0], way[1]))
    )
    attributes: dict[str, int | str | tuple[int, ...]] = {
        fmt.GROUP: group,
        fmt.OWNERS: tuple(range(len(sets[0]))),
        fmt.ROWS: border.attributes.get_int("experts", 0),
        fmt.ROW: row,
    }
    inputs: tuple[Value | None, ...] = (values[0], *ids)
    if not ids:
        ((route, _),) = comm.pulls[NodeOnGroup(border, instance.group)]
        inputs = (values[0], *((None,) if op_type == fmt.ROUTE else ()), *route.outputs[2:4])
    op = Comm(op_type, inputs, (values[1], *more), attributes, tag, of[1].value, cause, amount)
    comm.append(instance.group, op)
    comm.declare(of[1], values[1])
    return op


def _bytes(shape: tuple[int | str, ...] | None, row: int, ranks: int) -> str:
    """The bytes that a rank receives from the other ranks, if all experts have the same number of rows; "unknown" without a shape."""
    counts = [read(str(dim)) for dim in shape or ()]
    if shape is None or any(one is None for one in counts):
        return "unknown"
    share = Fraction(ranks - 1, ranks) * row
    found = as_dim(normal(sympy.Mul(sympy.Rational(share.numerator, share.denominator), *counts), {}))
    return str(found) if isinstance(found, int) else str(found.value)
