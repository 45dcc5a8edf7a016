"""Messages that send tokens' rows to the ranks of their experts and back: Route at the entry of an expert region, Return at its exit.

    ToExperts on 0-3, e (0,), m (0,)       %rows', %experts', %sent, %counts = Route(%rows, %experts)
                                backward   %rows.grad = Return(%rows'.grad, %sent, %counts)
    FromExperts                            %y = Return(%y', %sent, %counts)
                                backward   %y'.grad = Route(%y.grad, , %sent, %counts)

Route and Return are each other's transpose, so all four use the counts that the first Route has sent. A set of the process group lists the
ranks that share the experts, in the order of their runs of experts.

A row goes to a rank once for each of its experts there. Once in all would spare Routes only: results come back one for each expert, since
a token's sum is in the order of its choices, on whatever ranks these are; and a rank would have to be told which rows are which. Of the
bytes of a forward pass on two ranks a tenth would be spared for two of 8 experts, three eighths for eight of 128; in eight bits it is three
quarters.

With the plan's `messages: {rows: ..}` each is two messages, of codes and of scales (`eight_bits.py`). A row is whole blocks, so its bits do
not depend on the other rows; cotangents pass the rounding as they are, and travel in eight bits as well.

    %codes', %experts', %sent, %counts = Route(%codes, %experts)      %scales' = Route(%scales, , %sent, %counts)
"""

from __future__ import annotations

import math
from fractions import Fraction

import onnx_ir as ir
import sympy
from partc.compiler.analysis.infer_shapes import type_text
from partc.compiler.dims.normal import as_dim, normal
from partc.compiler.dims.reading import read
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.graph import BY_EXPERT
from partc.compiler.ir.programs import Comm, Event, Value
from partc.compiler.ir.sharded import ShardedValue
from partc.compiler.ir.value_info import ValueInfo
from partc.compiler.layout.layout import Layout
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.eight_bits import EightBits
from partc.compiler.lower.masked_replicas import operand
from partc.compiler.ops.families.neural.expert_rows import TO_EXPERTS, capacity_of
from partc.compiler.plan.precision import LEAST_BLOCK
from partc.compiler.sharding.values.operands import input_layout_of, output_layout_of
from partc.runtime.artifact import format as fmt

_NUMBERS = ir.TensorType(ir.DataType.INT64)
_PARTS = (ir.DataType.INT8, ir.DataType.FLOAT)
"""The types of codes and of scales."""
_FLOAT_BYTES = 4


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
    ids, numbers = operand(comm, instance, 1), comm.values.at[experts]
    _write(comm, instance, fmt.ROUTE, (rows, out), (read, output), (ids,), (numbers, sent, counts))
    comm.declare(experts, numbers)


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
) -> None:
    """Writes a Route or a Return that reads the first of `values` and makes the second, or both of its messages.

    `ids`: further inputs (the experts of the rows). `more`: further outputs (the places sent, the counts).
    """
    messages = comm.program.plan.messages
    if messages is None or (rules := messages.rows) is None:
        _send(comm, instance, op_type, values, of, ids, more)
        return
    columns = math.prod(_row(of[0]))
    if columns % rules.block:
        fact = f"a row of {columns} numbers, for the experts of '{_experts_path(comm, instance)}', is not blocks of {rules.block}"
        law = f"{columns} is not divisible by {rules.block}: a scale is of numbers of one row"
        fitting = [str(n) for n in range(LEAST_BLOCK, columns + 1) if columns % n == 0][-4:]
        help_ = f"write block: {' or '.join(fitting)}" if fitting else "leave out 'messages.rows'"
        raise CompileError(Problem(messages.where("rows"), fact, law, help_))
    source, target = (EightBits(comm, instance.group, value) for value in values)
    rows, item = values[0], comm.values[of[0].value].item_bytes
    if item != _FLOAT_BYTES:
        rows = source.op("Cast", [rows], "float", to=int(ir.DataType.FLOAT))
    parts = source.encoded(source.reshaped(rows, [-1, rules.block], "blocks"), "sent")
    came = []
    for part, word, kind, count in zip(
        parts, ("codes", "scales"), _PARTS, (columns, columns // rules.block), strict=True
    ):
        ends = tuple(_part(comm, one, word, kind, count) for one in of)
        leaving = source.reshaped(part, [-1, count], f"{word}.leaving")
        comm.declare(ends[0], leaving)
        came.append(comm.job.derived_on(instance.group, values[1], f".{word}"))
        _send(comm, instance, op_type, (leaving, came[-1]), (ends[0], ends[1]), ids, more)
        ids = more = ()
    codes = target.reshaped(came[0], [-1, rules.block], "codes.blocks")
    numbers = target.decoded(codes, target.reshaped(came[1], [-1], "scales.flat"), "numbers")
    if item != _FLOAT_BYTES:
        assert of[1].value.dtype is not None
        numbers = target.op("Cast", [numbers], "narrow", to=int(of[1].value.dtype))
    target.write("Reshape", [numbers, target.constant("row", [-1, *_row(of[1])])], [values[1]])
    comm.declare(of[1], values[1])


def _part(comm: CommLowering, of: ShardedValue, word: str, kind: ir.DataType, count: int) -> ShardedValue:
    """Returns the sharded value of the codes or the scales of rows, `count` for each row, in the layout of the rows."""
    info = comm.values[of.value]
    assert of.value.shape is not None
    assert info.shape is not None
    value = ir.Value(
        name=f"{of.value.name}.{word}", type=ir.TensorType(kind), shape=ir.Shape([of.value.shape[0], count])
    )
    value.meta.update({key: one for key, one in of.value.meta.items() if key == BY_EXPERT})
    comm.values.add(value, ValueInfo(type_text(value.type), (info.shape[0], count), kind.bitwidth // 8))
    return ShardedValue(value, of.group, Layout(of.layout.mesh, (of.layout.cuts[0], ())))


def _row(of: ShardedValue) -> tuple[int, ...]:
    return tuple([dim for dim in (of.value.shape or ())[1:] if isinstance(dim, int)])


def _border(instance: NodeOnGroup) -> ir.Node:
    """Returns the border at the entry of the region, whose Route others follow."""
    node = instance.node
    border = node if node.op_type == TO_EXPERTS else node.inputs[1].producer() if node.inputs[1] is not None else None
    assert border is not None
    return border


def _experts_path(comm: CommLowering, instance: NodeOnGroup) -> str:
    return comm.program.paths[_border(instance)].rpartition(".route")[0]


def _send(
    comm: CommLowering,
    instance: NodeOnGroup,
    op_type: str,
    values: tuple[Value, Value],
    of: tuple[ShardedValue, ShardedValue],
    ids: tuple[Value | None, ...],
    more: tuple[Value, ...],
) -> None:
    """Writes one Route or Return."""
    program, border = comm.program, _border(instance)
    sets, group = _sets(comm, instance)
    version = input_layout_of(program, NodeOnGroup(border, instance.group), 1)
    shape, info, row = comm.values.local_shape(version), comm.values[of[0].value], _row(of[0])
    amount = _bytes(shape, math.prod(row) * (info.item_bytes or 1), len(sets[0]))
    cause = f"rows for the experts of '{_experts_path(comm, instance)}'"
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
    if op_type == fmt.ROUTE and (capacity := capacity_of(border)) is not None:
        attributes[fmt.CAPACITY] = capacity
    entry, inputs = NodeOnGroup(border, instance.group), (values[0], *ids)
    if not ids:
        ((route, _),) = comm.pulls[entry]
        inputs = (values[0], *((None,) if op_type == fmt.ROUTE else ()), *route.outputs[2:4])
    op = Comm(op_type, inputs, (values[1], *more), attributes, tag, of[1].value, cause, amount)
    comm.append(instance.group, op)
    comm.declare(of[1], values[1])
    if ids:
        comm.pulls[entry] = ((op, instance.group),)


def _bytes(shape: tuple[int | str, ...] | None, row: int, ranks: int) -> str:
    """The bytes that a rank receives from the other ranks, if all experts have the same number of rows; "unknown" without a shape."""
    counts = [read(str(dim)) for dim in shape or ()]
    if shape is None or any(one is None for one in counts):
        return "unknown"
    share = Fraction(ranks - 1, ranks) * row
    found = as_dim(normal(sympy.Mul(sympy.Rational(share.numerator, share.denominator), *counts), {}))
    return str(found) if isinstance(found, int) else str(found.value)
