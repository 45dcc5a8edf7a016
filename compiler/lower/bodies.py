"""Writes the borders of bodies (`ops/families/control/bodies.py`) as events of all ranks of a group: Begin, Otherwise and End of one node.

    %turn, %going, %h = Begin(%count, %on, %h.0) {kind: Loop}   ...   %h.last, %ys = End(%going', %h', %y) {kind: Loop}

`emit` makes one If or Loop of what is between them. No value moves at a border; the three are events since the ranks must agree on them:
each collective of a body is in the same body on all of its ranks, and the branches and turns are the same. What a body gives is made by an
op inside of it, as the standard asks: an Identity, where it is a value of the graph around.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.programs import Comm, Event, Value
from partc.compiler.ir.sharded import Group, ranks_of
from partc.compiler.lower.comm import CommLowering
from partc.compiler.lower.masked_replicas import operand
from partc.compiler.ops.families.control.bodies import (
    BEGIN,
    END,
    IF,
    OTHERWISE,
    at_border,
    kind_of,
)
from partc.compiler.sharding.values.operands import output_layout_of
from partc.runtime.artifact import format as fmt

EVENTS = {BEGIN: fmt.BEGIN, OTHERWISE: fmt.OTHERWISE, END: fmt.END}


def write_border(comm: CommLowering, instance: NodeOnGroup) -> None:
    """Writes a border on a group; the nodes of states and results are written with their Begin or End."""
    node, group = instance.node, instance.group
    if node.op_type not in EVENTS:
        return
    kind, there = kind_of(node), [NodeOnGroup(one, group) for one in at_border(node)]
    inputs = list[Value | None]()
    if node.op_type == BEGIN:
        inputs = [operand(comm, instance, k) for k in range(len(node.inputs))]
        inputs += [operand(comm, one, 0) for one in there]
    elif node.op_type == END and kind != IF:
        inputs = [operand(comm, instance, 0), *(operand(comm, one, 0) for one in there)]
    elif node.op_type == OTHERWISE:
        inputs = [operand(comm, NodeOnGroup(one, group), 0) for one in at_border(_end_of(node))]
    elif node.op_type == END:
        inputs = [operand(comm, one, 1) for one in there]
    made = [NodeOnGroup(node, group)] * (kind != IF and node.op_type == BEGIN) * 2
    versions = [output_layout_of(comm.program, one, k) for k, one in enumerate(made)]
    versions += [] if node.op_type == OTHERWISE else [output_layout_of(comm.program, one, 0) for one in there]
    outputs = tuple([comm.values.at[one] for one in versions])
    if node.op_type != BEGIN:
        inputs = own_results(comm, group, inputs)
    event_tag = border_event(comm, instance, next(filter(None, (*outputs, *inputs))))
    step = border_step(comm, event_tag, kind, inputs, outputs)
    comm.append(group, step)
    comm.borders[instance] = step
    for version in versions:
        comm.declare(version, comm.values.at[version])


def border_event(comm: CommLowering, border: NodeOnGroup, first: Value) -> int:
    """Lists a border, or the same of the backward pass, as an event of its group and returns its tag; `first` is an operand or a result."""
    node, ranks, event_tag = border.node, (border.group,), len(comm.events)
    value, name = node.outputs[0], comm.group(ranks)
    cause = f"{'branch' if kind_of(node) == IF else 'turns'} of all ranks"
    shape = comm.values[value].shape
    comm.events.append(Event(event_tag, EVENTS[node.op_type], value, first, ranks, name, shape, "0", cause))
    return event_tag


def border_step(
    comm: CommLowering, tag: int, kind: str, inputs: Sequence[Value | None], outputs: Sequence[Value | None]
) -> Comm:
    """Returns the border of an event over values."""
    event = comm.events[tag]
    attributes: dict[str, int | str | tuple[int, ...]] = {fmt.GROUP: event.group, fmt.KIND: kind}
    return Comm(
        event.op_type, tuple(inputs), tuple(outputs), attributes, tag, event.value, event.cause, "0", task=comm.task
    )


def _end_of(otherwise: ir.Node) -> ir.Node:
    return next(use.node for use in otherwise.outputs[0].uses() if use.node.op_type == END)


def own_results(comm: CommLowering, ranks: Group, results: Sequence[Value | None]) -> list[Value | None]:
    """Returns the results of the body that is written last, each made by an op of this body, and different ones."""
    seen, own_values = set[Value](), list[Value | None]()
    defined = set[Value]()
    depth = 0
    for step, some in reversed(comm.job.steps):
        if not some & ranks_of(ranks[:1]):
            continue
        if isinstance(step, Comm) and step.op_type in (fmt.BEGIN, fmt.OTHERWISE, fmt.END):
            if depth == 0 and step.op_type != fmt.END:
                break
            depth += {fmt.END: 1, fmt.BEGIN: -1}.get(step.op_type, 0)
            if step.op_type == fmt.END and depth == 1:
                defined.update(step.makes)
            continue
        if depth == 0:
            defined.update(step.makes)
    for value in results:
        assert value is not None
        if value not in defined or value in seen:
            copy = comm.job.derived_on(ranks, value, ".given")
            comm.emit(ranks, "Identity", [value], copy)
            if value.of is not None:
                comm.job.declare(ranks, copy, value.of, value.shape)
            value = copy
        seen.add(value)
        own_values.append(value)
    return own_values
