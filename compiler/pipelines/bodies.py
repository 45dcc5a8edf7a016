"""The body of every task: what the ops of one label are for a rank, and which of them stand beside the call.

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
from partc.compiler.ir.rank_program import CommOp, ComputeOp, RankOp, TaskBody, made_names, read_names
from partc.compiler.pipelines.phases import Label, Labels, Phase, Place, Unit
from partc.compiler.pipelines.stages import NodeStages
from partc.runtime.artifact.format import RECV, SEND

_SMALL = 1024
"""Elements of a constant that a body may have itself; a larger one is an operand."""
_PRODUCTS = ("MatMul", "Gemm")
LETTERS = {Phase.FORWARD: "F", Phase.BACKWARD: "B", Phase.WEIGHT: "W"}


@dataclass
class Slot:
    """A task of any microbatch on all ranks: by unit the ops of its body, the events beside the calls, and all events in order."""

    bodies: dict[int, list[ComputeOp | CommOp]] = field(default_factory=dict)
    beside: list[tuple[Place, ...]] = field(default_factory=list)
    events: list[CommOp] = field(default_factory=list)


def slots(units: Sequence[Unit], labels: Labels, stages: NodeStages) -> dict[Label, Slot]:
    """By label its slot."""
    groups: dict[Label, list[tuple[Place, ...]]] = {}
    for places in labels.order:
        (unit, at), *_ = places
        label = labels.steps[unit][at]
        if label.phase in LETTERS:
            groups.setdefault(label, []).append(places)
    return {label: _slot(units, found, {*stages.groups[label.stage]}) for label, found in groups.items()}


def _slot(units: Sequence[Unit], order: Sequence[tuple[Place, ...]], hosts: set[int]) -> Slot:
    read: dict[int, set[str]] = {}
    beside: list[tuple[Place, ...]] = []
    inside: list[tuple[Place, ...]] = []
    for places in reversed(order):
        (first, at), *_ = places
        steps = [(unit, units[unit].steps[k]) for unit, k in places]
        crosses = isinstance(units[first].steps[at], CommOp) and any(not units[u].ranks <= hosts for u, _ in steps)
        alone = isinstance(units[first].steps[at], CommOp) and _is_message(units[first].steps[at])
        adds = units[first].adds_up(units[first].steps[at])
        delivers = isinstance(units[first].steps[at], ComputeOp) and units[first].ranks.isdisjoint(hosts) and not adds
        is_read = any(name in read.get(u, ()) for u, step in steps for name in made_names(step))
        if (delivers or crosses or alone) and not is_read:
            beside.append(places)
            continue
        inside.append(places)
        for unit, step in steps:
            read.setdefault(unit, set()).update(read_names(step))
    slot = Slot(beside=beside[::-1])
    for places in (*reversed(inside), *slot.beside):
        (first, at), *_ = places
        if isinstance(event := units[first].steps[at], CommOp):
            slot.events.append(event)
    for places in reversed(inside):
        for unit, at in places:
            step = units[unit].steps[at]
            assert isinstance(step, ComputeOp | CommOp)
            slot.bodies.setdefault(unit, []).append(step)
    return slot


def _is_message(step: RankOp) -> bool:
    return isinstance(step, CommOp) and step.op_type in (SEND, RECV)


class Inlined:
    """The ops of a unit that are once a step, and stand in the bodies that read them: transposes that matrix products take in, and
    small constants, which onnxruntime infers shapes by.
    """

    def __init__(self, unit: Unit, labels: Sequence[Label]) -> None:
        self.unit = unit
        self.makers = {
            name: step
            for step, label in zip(unit.steps, labels, strict=True)
            if label.phase is Phase.ONCE and isinstance(step, ComputeOp)
            if step.node.op_type == "Transpose" or _is_small_constant(step)
            for name in made_names(step)
        }

    def among(self, steps: Sequence[ComputeOp | CommOp]) -> tuple[list[ComputeOp | CommOp], list[str]]:
        """The ops of a body with those that they want, and what these make.

        Each stands before its first reader, and so in the session of that, where a body has several.
        """
        found: list[ComputeOp | CommOp] = []
        made: dict[str, None] = {}

        def add(name: str, again: str) -> None:
            if name in self.makers and name not in made:
                for operand in read_names(self.makers[name]):
                    add(operand, again)
                made[name] = None
                found.append(replace(self.makers[name], again=again))

        for step in steps:
            product = isinstance(step, ComputeOp) and step.node.op_type in _PRODUCTS
            for name in read_names(step):
                if name in self.makers and (product or _is_small_constant(self.makers[name])):
                    add(name, step.again if isinstance(step, ComputeOp) else "")
            found.append(step)
        return found, [*made]

    def unread(self, bodies: Iterable[TaskBody], inside: Collection[RankOp]) -> set[RankOp]:
        """Those that nothing reads but bodies that have them; `inside` are the ops of bodies."""
        read = {one.name for one in self.unit.program.outputs} | {one.next for one in self.unit.program.kept}
        read.update(name for body in bodies for name in body.inputs)
        gone: set[RankOp] = set()
        for step in reversed(self.unit.steps):
            if step in inside:
                continue
            if read.isdisjoint(made := made_names(step)) and any(name in self.makers for name in made):
                gone.add(step)
            else:
                read.update(read_names(step))
        return gone


def with_products_added(
    unit: Unit, steps: Sequence[ComputeOp | CommOp], wanted: Collection[str]
) -> list[ComputeOp | CommOp]:
    """The ops of a body with `Add(Gemm(a, b), sum)` as `Gemm(a, b, sum)`, where nothing else reads the product."""
    readers = Counter(name for step in steps for name in read_names(step))
    makers = {name: step for step in steps for name in made_names(step)}
    gone: set[RankOp] = set()
    instead: dict[RankOp, ComputeOp] = {}
    for step in steps:
        if not isinstance(step, ComputeOp) or step.node.op_type != "Add" or not unit.adds_up(step):
            continue
        (kept,) = [name for name in read_names(step) if name in unit.sums]
        product = next(name for name in read_names(step) if name != kept)
        maker = makers.get(product)
        if readers[product] == 1 and product not in wanted and isinstance(maker, ComputeOp) and _takes_term(maker.node):
            given = [ir.Value(name=value.name) for value in maker.node.inputs[:2] if value is not None]
            attributes = [one for name, one in maker.node.attributes.items() if name != "beta"]
            node = ir.Node("", "Gemm", [*given, ir.Value(name=kept)], attributes, version=maker.node.version)
            node.outputs[0].name = node.name = made_names(step)[0]
            gone.add(step)
            instead[maker] = ComputeOp(node, maker.source, task=step.task)
    return [instead.get(step, step) for step in steps if step not in gone]


def _takes_term(node: ir.Node) -> bool:
    """Whether a node is a Gemm without a third operand."""
    return node.op_type == "Gemm" and node.domain == "" and (len(node.inputs) < 3 or node.inputs[2] is None)


def body_name(label: Label) -> str:
    """The name of the function of a task."""
    return f"{LETTERS[label.phase]}{label.stage}"


def body_of(unit: Unit, label: Label, steps: Sequence[ComputeOp | CommOp], wanted: set[str]) -> TaskBody:
    """The body of a task on a unit's ranks; `wanted` are the values that others read of it."""
    made = {name for step in steps for name in made_names(step) if name}
    reads = dict.fromkeys(name for step in steps for name in read_names(step) if name)
    own = {name for name in reads if _is_small(unit.program.constants.get(name))}
    types = unit.program.types
    return TaskBody(
        stage=label.stage,
        kind=LETTERS[label.phase],
        inputs=tuple(name for name in reads if name not in made and name not in own),
        outputs=tuple(name for step in steps for name in made_names(step) if name in wanted),
        steps=tuple(steps),
        types={name: types[name] for name in (*reads, *sorted(made)) if name in types},
    )


def _is_small_constant(step: ComputeOp) -> bool:
    if step.node.op_type != "Constant":
        return False
    tensor = ir.convenience.get_const_tensor(step.node.outputs[0])
    return tensor is not None and tensor.size <= _SMALL


def _is_small(constant: object) -> bool:
    return isinstance(constant, np.ndarray) and constant.size <= _SMALL


def readers_beside(units: Sequence[Unit], labels: Labels, found: Mapping[Label, Slot]) -> list[dict[Label, set[str]]]:
    """By unit and label the names that anything else than the body of the label reads."""
    bodies = {
        (label, unit): {id(step) for step in steps}
        for label, slot in found.items()
        for unit, steps in slot.bodies.items()
    }
    outside: list[dict[str, set[Label | None]]] = []
    for k, unit in enumerate(units):
        readers: dict[str, set[Label | None]] = {}
        for step, label in zip(unit.steps, labels.steps[k], strict=True):
            reader = label if id(step) in bodies.get((label, k), ()) else None
            for name in read_names(step):
                readers.setdefault(name, set()).add(reader)
        outside.append(readers)
    result: list[dict[Label, set[str]]] = []
    for k, unit in enumerate(units):
        held = {one.name for one in unit.program.outputs} | {one.next for one in unit.program.kept if one.next}
        own: dict[Label, set[str]] = {}
        for step, label in zip(unit.steps, labels.steps[k], strict=True):
            for name in made_names(step):
                if name in held or outside[k].get(name, set()) - {label}:
                    own.setdefault(label, set()).add(name)
        result.append(own)
    return result
