"""The body of every task: the ops of one label for a rank, and the ops that stay next to the call.

    of one microbatch     x -> MatMul -> AllReduce -> Relu -> Send(h)        label F0
    body F0               x -> MatMul -> AllReduce -> Relu -> h              runs as one call, whichever microbatch it is
    beside it             Send(h)                                            in the row, behind the call

The transpose of a weight is once a step, and costs nothing in a matrix product that reads it: it stands in every body with such a product,
so that no copy of the weight is made.

The product that is a weight's gradient is added to the sum by the Gemm itself, which saves a pass over the weight for every microbatch.

A message between stages stands in the row, behind the task that makes it, on both of its ranks; so does a collective that has ranks of
another stage. One whose result the same task reads on any rank is part of the body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.programs import Body, Comm, Compute, Op, Value
from partc.compiler.pipelines.phases import Label, Labels, Phase, Place, Unit
from partc.compiler.pipelines.stages import NodeStages
from partc.runtime.artifact.format import RECV, SEND

_SMALL = 1024
"""Elements of a constant that a body may have itself; a larger one is an operand."""
PRODUCTS = ("MatMul", "Gemm")
LETTERS = {Phase.FORWARD: "F", Phase.BACKWARD: "B", Phase.WEIGHT: "W"}


@dataclass
class Slot:
    """A task of any microbatch on all ranks: the ops of its body by unit, the events next to the calls, and all events in order."""

    bodies: dict[int, list[Compute | Comm]] = field(default_factory=dict)
    beside: list[tuple[Place, ...]] = field(default_factory=list)
    events: list[Comm] = field(default_factory=list)


def slots(units: Sequence[Unit], labels: Labels, stages: NodeStages) -> dict[Label, Slot]:
    """Maps each label to its slot."""
    groups: dict[Label, list[tuple[Place, ...]]] = {}
    for places in labels.order:
        (unit, at), *_ = places
        label = labels.steps[unit][at]
        if label.phase in LETTERS:
            groups.setdefault(label, []).append(places)
    return {label: _slot(units, found, {*stages.groups[label.stage]}) for label, found in groups.items()}


def _slot(units: Sequence[Unit], order: Sequence[tuple[Place, ...]], hosts: set[int]) -> Slot:
    read: dict[int, set[Value]] = {}
    beside: list[tuple[Place, ...]] = []
    inside: list[tuple[Place, ...]] = []
    for places in reversed(order):
        (first, at), *_ = places
        step, unit = units[first].steps[at], units[first]
        ends = [(u, units[u].steps[k]) for u, k in places]
        crosses = isinstance(step, Comm) and any(not units[u].ranks <= hosts for u, _ in ends)
        message = isinstance(step, Comm) and step.op_type in (SEND, RECV)
        delivers = isinstance(step, Compute) and unit.ranks.isdisjoint(hosts) and not unit.adds_up(step)
        is_read = any(value in read.get(u, ()) for u, end in ends for value in end.makes)
        if (delivers or crosses or message) and not is_read:
            beside.append(places)
            continue
        inside.append(places)
        for u, end in ends:
            read.setdefault(u, set()).update(end.reads)
    slot = Slot(beside=beside[::-1])
    for places in (*reversed(inside), *slot.beside):
        (first, at), *_ = places
        if isinstance(event := units[first].steps[at], Comm):
            slot.events.append(event)
    for places in reversed(inside):
        for u, at in places:
            step = units[u].steps[at]
            assert isinstance(step, Compute | Comm)
            slot.bodies.setdefault(u, []).append(step)
    return slot


class Inlined:
    """The ops of a unit that are once a step, and stand in the bodies that read them: transposes that matrix products take in, and
    small constants, which onnxruntime infers shapes by.
    """

    def __init__(self, unit: Unit, labels: Sequence[Label]) -> None:
        self.unit = unit
        self.makers = {
            value: step
            for step, label in zip(unit.steps, labels, strict=True)
            if label.phase is Phase.ONCE and isinstance(step, Compute)
            if step.node.op_type == "Transpose" or _is_small_constant(step)
            for value in step.makes
        }

    def among(self, steps: Sequence[Compute | Comm]) -> tuple[list[Compute | Comm], list[Value]]:
        """The ops of a body with those that they want, and what these make.

        Each stands before its first reader, and so in the session of that, where a body has several.
        """
        ops: list[Compute | Comm] = []
        values: dict[Value, None] = {}

        def add(value: Value, again: str) -> None:
            if value in self.makers and value not in values:
                for operand in self.makers[value].reads:
                    add(operand, again)
                values[value] = None
                ops.append(replace(self.makers[value], again=again))

        for step in steps:
            product = isinstance(step, Compute) and step.node.op_type in PRODUCTS
            for value in step.reads:
                if value in self.makers and (product or _is_small_constant(self.makers[value])):
                    add(value, step.again if isinstance(step, Compute) else "")
            ops.append(step)
        return ops, [*values]

    def unread(self, read: Iterable[Value], inside: Collection[Op]) -> set[Op]:
        """The ops whose results only bodies read that have these ops themselves; `read`: the inputs of bodies, `inside`: their ops."""
        read = {*self.unit.program.live_out, *read}
        gone: set[Op] = set()
        for step in reversed(self.unit.steps):
            if step in inside:
                continue
            if read.isdisjoint(step.makes) and any(value in self.makers for value in step.makes):
                gone.add(step)
            else:
                read.update(step.reads)
        return gone


def with_products_added(unit: Unit, steps: Sequence[Compute | Comm], wanted: Collection[Value]) -> list[Compute | Comm]:
    """The ops of a body with `Add(Gemm(a, b), sum)` as `Gemm(a, b, sum)`, where nothing else reads the product."""
    readers = Counter(value for step in steps for value in step.reads)
    makers = {value: step for step in steps for value in step.makes}
    gone: set[Op] = set()
    instead: dict[Op, Compute] = {}
    for step in steps:
        if not isinstance(step, Compute) or step.node.op_type != "Add" or not unit.adds_up(step):
            continue
        (kept,) = [value for value in step.reads if value in unit.sums]
        product = next(value for value in step.reads if value is not kept)
        maker = makers.get(product)
        if readers[product] > 1 or product in wanted:
            continue
        if isinstance(maker, Compute) and maker.is_op("Gemm") and not any(maker.inputs[2:]):
            attributes = [one for name, one in maker.node.attributes.items() if name != "beta"]
            node = ir.Node("", "Gemm", [], attributes, version=maker.node.version)
            gone.add(step)
            inputs = (*maker.inputs[:2], kept)
            instead[maker] = Compute(node, maker.source, inputs, step.outputs, label=step.makes[0], task=step.task)
    return [instead.get(step, step) for step in steps if step not in gone]


def body_name(label: Label) -> str:
    """The name of the function of a task."""
    return f"{LETTERS[label.phase]}{label.stage}"


def body_of(label: Label, steps: Sequence[Compute | Comm], wanted: Collection[Value]) -> Body:
    """The body of a task on a unit's ranks; `wanted` are the values that others read of it."""
    computed = {value for step in steps for value in step.makes}
    reads = dict.fromkeys(value for step in steps for value in step.reads)
    small = {one for one in reads if isinstance(one.constant, np.ndarray) and one.constant.size <= _SMALL}
    return Body(
        stage=label.stage,
        kind=LETTERS[label.phase],
        inputs=tuple(value for value in reads if value not in computed and value not in small),
        outputs=tuple(value for step in steps for value in step.makes if value in wanted),
        steps=tuple(steps),
    )


def _is_small_constant(step: Compute) -> bool:
    if step.node.op_type != "Constant":
        return False
    tensor = ir.convenience.get_const_tensor(step.node.outputs[0])
    return tensor is not None and tensor.size <= _SMALL


def readers_beside(units: Sequence[Unit], labels: Labels, found: Mapping[Label, Slot]) -> list[dict[Label, set[Value]]]:
    """Maps each unit and label to the values that something other than the label's body reads."""
    bodies = {(label, unit): {*steps} for label, slot in found.items() for unit, steps in slot.bodies.items()}
    result: list[dict[Label, set[Value]]] = []
    for k, unit in enumerate(units):
        readers: dict[Value, set[Label | None]] = {}
        for step, label in zip(unit.steps, labels.steps[k], strict=True):
            reader = label if step in bodies.get((label, k), ()) else None
            for value in step.reads:
                readers.setdefault(value, set()).add(reader)
        results, own = {*unit.program.live_out}, dict[Label, set[Value]]()
        for step, label in zip(unit.steps, labels.steps[k], strict=True):
            for value in step.makes:
                if value in results or readers.get(value, set()) - {label}:
                    own.setdefault(label, set()).add(value)
        result.append(own)
    return result
