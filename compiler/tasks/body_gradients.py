"""The gradients of bodies between borders (`ops/families/control/bodies.py`): another body of the kind, with its own communication.

    forward    Begin(n, c, x) -> i, on, h                       y, g, ...              End(on', h', i) -> x', is, hs
    backward   Begin(turns, , x'.grad, zeros) -> k, on, h'.grad, w.sum
                 h = hs[turns-1-k]   y, g, ... again   their gradients                 End(on, h.grad, w.sum + w.grad) -> x.grad, w.grad

    forward    Begin(c)       a, ...          Otherwise(a)       b, ...          End(b) -> y
    backward   Begin(not c)   b, ... again, their gradients   Otherwise(...)   a, ... again, their gradients   End(...) -> w.grad

A Loop keeps the states with which its turns begin; all else of a body is computed again from these, by copies of its ops and collectives
on the same ranks, those alone whose results a gradient reads. While the gradients of a body's nodes are written, its values are these
copies, so a node in a body has the gradient of any node. Contributions of a body's nodes to the cotangents of values of the graph around
are added up over the turns, each in its layout: partial sums of a weight's gradient are reduced once, after the last turn. Of an If the
other branch contributes zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np
import onnx_ir as ir
from partc.compiler.ir.choice import NodeOnGroup
from partc.compiler.ir.local_form import LocalForm
from partc.compiler.ir.programs import Comm, Compute, Value, exchanged, with_values
from partc.compiler.ir.sharded import Group, Ranks, ShardedValue, ranks_of
from partc.compiler.layout.layout import Layout
from partc.compiler.layout.mesh import normal
from partc.compiler.lower.bodies import border_event, border_step, own_results
from partc.compiler.lower.comm import CommLowering, computed
from partc.compiler.lower.job import Placed
from partc.compiler.lower.local_view import Localized
from partc.compiler.lower.masked_replicas import operand
from partc.compiler.ops.families.control.bodies import (
    BEGIN,
    CARRIED,
    END,
    IF,
    LOOP,
    OTHERWISE,
    STACK,
    at_border,
    carry_of,
    kind_of,
)
from partc.compiler.sharding.values.operands import input_layout_of
from partc.compiler.tasks.duals import dual_of_input, typed
from partc.compiler.tasks.node_gradients import NodeGradients
from partc.compiler.tasks.reduce_gradients import GradientReduction
from partc.runtime.artifact import format as fmt

Contributions = dict[ShardedValue, dict[ShardedValue, list[Value]]]
"""Maps each version that is read to its cotangent contributions by layout."""
_Key = tuple[ShardedValue, ShardedValue]
"""A version of the graph around a body, and the layout of a contribution to its cotangent."""
_Results = list[tuple[_Key, Value]]


class BackwardPass(Protocol):
    """The backward pass that visits the nodes: `contributions` are to cotangents of which the makers are not visited yet."""

    program: Localized
    comm: CommLowering
    cotangents: Mapping[ir.Value, ir.Value]
    needed: set[ir.Value]
    forms: dict[NodeOnGroup, tuple[tuple[LocalForm, Group], ...]]
    sums: GradientReduction
    node_gradients: NodeGradients
    contributions: Contributions

    def incoming(self, instance: NodeOnGroup, *, passes: bool) -> tuple[dict[Value, Value], object]:
        """Removes the contributions to a node's outputs, and returns the cotangents by output."""
        ...

    def give(self, version: ShardedValue, layout: Layout, dx: Value) -> None:
        """Lists a contribution."""
        ...


class _Again:
    """Copies of the forward ops of a body on its ranks, in the backward task."""

    def __init__(self, comm: CommLowering, ranks: Ranks, values: Mapping[Value, Value]) -> None:
        self.comm, self.ranks = comm, ranks
        self.values = dict(values)
        """Maps each value of the body to its copy; at first, those that are not computed again."""
        self.ops: dict[Compute | Comm, Compute | Comm] = {}
        self.tags: dict[int, int] = {}
        """Maps the tag of each event to that of its copy."""

    def write(self, steps: Iterable[Placed]) -> None:
        """Appends copies of some steps to the job."""
        for step, ranks in steps:
            if (here := ranks & self.ranks) and isinstance(step, Compute | Comm):
                self.ops[step] = copy = self._copy(step, here)
                self.comm.append(here, copy)

    def form(self, form: LocalForm) -> LocalForm:
        """Returns the local form of a node over the copies."""
        values = {handle: self.values.get(value, value) for handle, value in form.values.items()}
        ops = [one for op in form.ops if isinstance(one := self.ops.get(op, op), Compute)]
        return replace(form, values=values, ops=ops)

    def _copy(self, step: Compute | Comm, ranks: Ranks) -> Compute | Comm:
        job = self.comm.job
        for value in step.makes:
            if value not in self.values:
                self.values[value] = job.derived_on(ranks, value, ".again")
            if job.listed.ranks(value) and value.of is not None:
                job.declare(ranks, self.values[value], value.of, value.shape)
        if isinstance(step, Comm):
            inputs, outputs = exchanged(step.inputs, self.values), exchanged(step.outputs, self.values)
            return replace(step, inputs=inputs, outputs=outputs, tag=self._tag(step.tag), task=self.comm.task)
        copy, label = with_values(step, self.values), step.label
        if isinstance(label, str):
            label = f"{label}.again" if label else label
        else:
            label = Value(label.hint, self.values[label.base]) if label.base in self.values else copy.label
        return replace(copy, label=label, task=self.comm.task)

    def _tag(self, tag: int) -> int:
        """Returns the number of the copy of an event."""
        if tag not in self.tags:
            event, self.tags[tag] = self.comm.events[tag], len(self.comm.events)
            output = self.values.get(event.output, event.output)
            self.comm.events.append(replace(event, tag=self.tags[tag], output=output, cause=f"{event.cause}, again"))
        return self.tags[tag]


@dataclass
class _Body:
    """A body whose gradient is being written, between the forward pass's `begin` and `end`; `tag` is that of the first border.

    `outer` and `shapes`: the contributions to cotangents, and the values of shapes, in the graph around. `first`: the number of steps
    before it. `dys`: maps each Carried, Stack or Either to the cotangent of its result, within a turn that of what the turn makes.
    """

    begin: NodeOnGroup
    end: NodeOnGroup
    tag: int
    outer: Contributions
    shapes: dict[Value, Value]
    first: int
    dys: dict[NodeOnGroup, Value]
    copies: list[_Again] = field(default_factory=list)
    around: list[Placed] = field(default_factory=list)
    """The ops right before the body."""
    operands: list[Value] = field(default_factory=list)
    """The condition of an If; the turn's number, and whether a turn follows, of a Loop."""
    starts: list[Value] = field(default_factory=list)
    """The number of turns, and what the first turn begins with."""
    states: dict[NodeOnGroup, Value] = field(default_factory=dict)
    """Maps each Carry to the cotangent with which a turn of the backward pass begins."""
    turns: dict[Value, tuple[Value, Value]] = field(default_factory=dict)
    """Maps what a forward turn begins with, as it is read here, to that of the forward pass and to its stack of all turns."""
    branch: list[Placed] = field(default_factory=list)
    terms: dict[_Key, Value] = field(default_factory=dict)
    """The ops of the branch that is written first, and what they contribute."""
    middle: int = -1
    """The tag of the border between two branches."""


class BodyGradients:
    """Writes gradients of bodies for a backward pass, whose nodes it visits from the last to the first."""

    def __init__(self, back: BackwardPass) -> None:
        self.back, self.comm, self.job, self.values = back, back.comm, back.comm.job, back.comm.values
        self.program, self.nodes = back.program, list(back.program.model.graph)
        self.places = {node: place for place, node in enumerate(self.nodes)}
        self.open: list[_Body | None] = []
        """The bodies around the node that is visited; None for one without a gradient."""

    def visit(self, border: NodeOnGroup) -> None:
        """Passes a border; those of states and results are passed with their Begin or End."""
        op_type = border.node.op_type
        if op_type == END:
            self.open.append(self._end(border))
        elif op_type == OTHERWISE and (body := self.open[-1]) is not None:
            self._otherwise(body, border)
        elif op_type == BEGIN and (body := self.open.pop()) is not None:
            results = self._begin_if(body) if kind_of(border.node) == IF else self._begin_loop(body)
            self._renumber(body)
            self.back.contributions, self.back.node_gradients.shapes = body.outer, body.shapes
            for (version, given), value in results:
                if version.value in self.back.needed:
                    self.back.contributions.setdefault(version, {}).setdefault(given, []).append(value)

    def _end(self, end: NodeOnGroup) -> _Body | None:
        """Begins the gradient of a body at its last border, if one of its results has a cotangent."""
        back, dys = self.back, dict[NodeOnGroup, Value]()
        for result in self._at(end):
            dys.update((result, dy) for dy in back.incoming(result, passes=False)[0].values())
        if not dys:
            return None
        kind = kind_of(end.node)
        begin = self._producer(end, 1 if kind == LOOP else 0)
        tag = border_event(self.comm, begin, next(iter(dys.values())))
        body = _Body(begin, end, tag, back.contributions, back.node_gradients.shapes, len(self.job.steps), dys)
        if kind == LOOP:
            self._turn(body)
            return body
        condition = operand(self.comm, begin, 0)
        assert condition is not None
        body.operands = [self._before(body, "Not", [condition], condition, ".not")]
        self._declare(body, body.operands[0], ir.DataType.BOOL, condition.shape or ())
        self._enter(body, self._producer(end, 1), end, {}, 1)
        return body

    def _turn(self, body: _Body) -> None:
        """Begins a turn of the backward Loop: its number, what the forward turn begins with, and the ops of the forward turn again."""
        group, job, comm = body.begin.group, self.job, self.comm
        turn, going, *states = comm.borders[body.begin].outputs
        assert turn is not None
        assert going is not None
        number, follows = job.derived_on(group, turn, ".back"), job.derived_on(group, going, ".back")
        body.operands = [number, follows]
        for value, kind in (number, ir.DataType.INT64), (follows, ir.DataType.BOOL):
            self._declare(body, value, kind, [])
        begun = [turn, *(state for state in states if state is not None)]
        stacks = {value: job.derived_on(group, value, ".turns") for value in begun}
        zero, one = (comm.constant(group, number, word, np.array(k)) for k, word in enumerate(("zero", "one")))
        sizes = self._before(body, "Shape", [stacks[turn]], number, ".sizes")
        body.starts.append(self._before(body, "Gather", [sizes, zero], number, ".count"))
        self._declare(body, body.starts[0], ir.DataType.INT64, [])
        last = self._before(body, "Sub", [body.starts[0], one], number, ".last")
        at = comm.derived_op(group, "Sub", [last, number], number, "at")
        copies = dict[Value, Value]()
        for value, stack in stacks.items():
            assert value.of is not None
            assert value.of.dtype is not None
            copies[value] = comm.derived_op(group, "Gather", [stack, at], value, "again")
            job.declare(group, copies[value], value.of, value.shape)
            self._declare(body, stack, value.of.dtype, [None, *(value.shape or ())])
            body.turns[copies[value]] = value, stack
        copies[going] = comm.constant(group, going, "again", np.full([1] * len(going.shape or ()), True))
        for result in self._at(body.end):
            state = NodeOnGroup(carry_of(result.node), group) if result.node.op_type == CARRIED else None
            if state is not None and state.node.outputs[0] in self.back.needed:
                version, start = self._cotangent(result, 0), operand(comm, state, 0)
                assert start is not None
                body.starts.append(body.dys.get(result) or self._zeros(start, version, body))
                body.states[state] = body.dys[result] = job.derived_on(group, start, ".dy")
                comm.declare(version, body.states[state])
            elif result in body.dys and result.node.op_type == STACK:
                body.dys[result] = comm.derived_op(group, "Gather", [body.dys[result], at], body.dys[result], "turn")
                comm.declare(self._cotangent(result, 0), body.dys[result])
        self._enter(body, body.begin, body.end, copies, 0)

    def _enter(
        self, body: _Body, after: NodeOnGroup, before: NodeOnGroup, copies: Mapping[Value, Value], k: int
    ) -> None:
        """Writes the ops between two borders again, from which on their values are these copies; input `k` of each result has its
        cotangent.
        """
        back, comm, group = self.back, self.comm, body.begin.group
        back.contributions, back.node_gradients.shapes = {}, dict(body.shapes)
        borders = comm.borders[after], comm.borders[before]
        first, last = (place for place, (step, _) in enumerate(self.job.steps) if step in borders)
        again = _Again(comm, ranks_of(group), copies)
        again.write(self.job.steps[first + 1 : last])
        body.copies.append(again)
        for node in self.nodes[self.places[after.node] : self.places[before.node]]:
            here = NodeOnGroup(node, group)
            for version in chain.from_iterable(self.values.versions(value) for value in node.outputs):
                if (copy := again.values.get(self.values.at[version])) is not None:
                    self.values.bind(version, copy)
            if here in back.forms:
                back.forms[here] = tuple((again.form(form), ranks) for form, ranks in back.forms[here])
            if here in comm.borders and isinstance(border := again.ops.get(comm.borders[here]), Comm):
                comm.borders[here] = border
            if here in comm.rings:
                largest, total = comm.rings[here]
                comm.rings[here] = again.values.get(largest, largest), again.values.get(total, total)
        comm.masked.update({key: again.values[one] for key, one in comm.masked.items() if one in again.values})
        for result, dy in body.dys.items():
            version = input_layout_of(self.program, result, k)
            if version.value in back.needed:
                back.give(version, dual_of_input(self.program, result, k), dy)

    def _otherwise(self, body: _Body, otherwise: NodeOnGroup) -> None:
        """Ends the gradient of the branch of an If that runs if its condition is not met, and begins that of the other one."""
        body.terms = self._terms()
        body.branch = self._taken(body, body.terms.values())
        body.middle = border_event(self.comm, otherwise, body.operands[0])
        self._enter(body, body.begin, otherwise, {}, 0)

    def _begin_if(self, body: _Body) -> _Results:
        """Ends the gradient of an If: each branch gives all that either contributes, zeros for what the other alone does."""
        group, comm, terms = body.begin.group, self.comm, self._terms()
        branches = (body.terms, body.branch), (terms, self._taken(body, terms.values()))
        results = [(key, self._result(*key)) for key in {**body.terms, **terms}]
        tags = body.middle, border_event(self.comm, body.end, body.operands[0])
        self.job.steps += body.around
        comm.append(group, border_step(comm, body.tag, IF, body.operands, ()))
        for (given, steps), tag in zip(branches, tags, strict=True):
            self.job.steps += steps
            made = [given.get(key) or self._zeros(self.values.at[key[0]], key[1]) for key, _ in results]
            outputs = [value for _, value in results] if tag == tags[-1] else []
            comm.append(group, border_step(comm, tag, IF, own_results(comm, group, made), outputs))
        return results

    def _begin_loop(self, body: _Body) -> _Results:
        """Ends the gradient of a Loop: cotangents of states are handed on, and contributions are added to those of earlier turns."""
        group, comm, results = body.begin.group, self.comm, _Results()
        following, begun = list[Value](), [*body.operands, *body.states.values()]
        for state in body.states:
            dy = next(iter(self.back.incoming(state, passes=False)[0].values()), None)
            key = input_layout_of(self.program, state, 0), self._cotangent(state, 0)
            following.append(dy or self._zeros(self.values.at[key[0]], key[1]))
            results.append((key, self._result(*key)))
        for key, term in self._terms().items():
            begun.append(self.job.derived_on(group, term, ".before"))
            comm.declare(key[1], begun[-1])
            body.starts.append(self._zeros(self.values.at[key[0]], key[1], body))
            following.append(comm.derived_op(group, "Add", [begun[-1], term], term, "sum"))
            comm.declare(key[1], following[-1])
            results.append((key, self._result(*key)))
        steps = self._taken(body, following)
        self._keep_turns(body, {value for step, _ in steps for value in step.reads})
        self.job.steps += body.around
        count, *starts = body.starts
        comm.append(group, border_step(comm, body.tag, LOOP, (count, None, *starts), begun))
        self.job.steps += steps
        last = border_event(self.comm, body.end, body.operands[0])
        made = own_results(comm, group, [body.operands[1], *following])
        comm.append(group, border_step(comm, last, LOOP, made, [value for _, value in results]))
        return results

    def _keep_turns(self, body: _Body, read: Collection[Value]) -> None:
        """Has the forward Loop give what its turns begin with, as far as the backward turns read it; the turn's number always."""
        group, end = body.begin.group, self.comm.borders[body.end]
        number = next(iter(body.turns))
        kept = [of for copy, of in body.turns.items() if copy in read or copy is number]
        own = [self.job.derived_on(group, value, ".begun") for value, _ in kept]
        steps = [
            replace(computed("Identity", [value], [copy]), task=end.task)
            for (value, _), copy in zip(kept, own, strict=True)
        ]
        for (value, _), copy in zip(kept, own, strict=True):
            if value.of is not None:
                self.job.declare(group, copy, value.of, value.shape)
        inputs, outputs = (*end.inputs, *own), (*end.outputs, *(stack for _, stack in kept))
        longer = replace(end, inputs=inputs, outputs=outputs)
        placed: list[Placed] = [(step, ranks_of(group)) for step in steps]
        self.job.replace(group, end, [*placed, (longer, ranks_of(group))])

    def _terms(self) -> dict[_Key, Value]:
        """Removes what the nodes of a body contribute to the cotangents of values around it; adds up what has one layout."""
        given, self.back.contributions = self.back.contributions, {}
        return {
            (version, layout): self.back.sums.sum_of(layout, values)
            for version, by_layout in given.items()
            for layout, values in by_layout.items()
        }

    def _taken(self, body: _Body, results: Iterable[Value]) -> list[Placed]:
        """Removes the steps of a branch or a turn from the job, and returns those that are needed for its results.

        Ops, and copies of collectives and bodies, go if nothing reads what they make.
        """
        steps, copied = self.job.take(body.first), {*body.copies[-1].tags.values()}
        after = {*results}
        while True:
            read = after | {value for step, _ in steps for value in step.reads}
            unread, open_ = set[int](), list[int]()
            for place, (step, _) in enumerate(steps):
                if isinstance(step, Comm) and step.op_type in (fmt.BEGIN, fmt.OTHERWISE, fmt.END):
                    if step.op_type == fmt.BEGIN:
                        open_.append(place)
                    elif step.op_type == fmt.END:
                        begin = open_.pop()
                        if step.tag in copied and read.isdisjoint(step.makes):
                            unread.update(range(begin, place + 1))
                elif read.isdisjoint(step.makes) and (isinstance(step, Compute) or getattr(step, "tag", -1) in copied):
                    unread.add(place)
            wanted = {step.tag for k, (step, _) in enumerate(steps) if isinstance(step, Comm) and k not in unread}
            left = [
                one
                for k, one in enumerate(steps)
                if k not in unread or (isinstance(one[0], Comm) and one[0].tag in wanted)
            ]
            if len(left) == len(steps):
                return steps
            steps = left

    def _renumber(self, body: _Body) -> None:
        """Numbers the events of a body anew, without those of removed copies, in their order."""
        steps, events = self.job.take(body.first), self.comm.events
        tags = dict.fromkeys(step.tag for step, _ in steps if isinstance(step, Comm))
        new = {tag: body.tag + place for place, tag in enumerate(tags)}
        events[body.tag :] = [replace(events[tag], tag=number) for tag, number in new.items()]
        self.job.steps += [
            (replace(step, tag=new[step.tag]) if isinstance(step, Comm) else step, ranks) for step, ranks in steps
        ]

    def _at(self, border: NodeOnGroup) -> list[NodeOnGroup]:
        return [NodeOnGroup(node, border.group) for node in at_border(border.node)]

    def _producer(self, border: NodeOnGroup, k: int) -> NodeOnGroup:
        """Returns the border that input `k` of another one is from."""
        value = border.node.inputs[k]
        node = None if value is None else value.producer()
        assert node is not None
        return NodeOnGroup(node, border.group)

    def _cotangent(self, at: NodeOnGroup, k: int) -> ShardedValue:
        """Returns the layout of the cotangent of input `k` of a state or a result."""
        version = input_layout_of(self.program, at, k)
        return ShardedValue(
            self.back.cotangents[version.value], version.group, normal(dual_of_input(self.program, at, k))
        )

    def _result(self, version: ShardedValue, layout: ShardedValue) -> Value:
        """Returns a new value after a body: what it contributes to the cotangent of a version."""
        value = self.job.derived_on(layout.group, self.values.at[version], ".grad.body")
        self.comm.declare(layout, value)
        return value

    def _before(self, body: _Body, op_type: str, inputs: Sequence[Value], base: Value, suffix: str) -> Value:
        """Writes an op right before the body."""
        value = self.comm.derived_op(body.begin.group, op_type, inputs, base, suffix.removeprefix("."))
        body.around.append(self.job.steps.pop())
        return value

    def _zeros(self, like: Value, layout: ShardedValue, body: _Body | None = None) -> Value:
        """Writes zeros of a layout and the shape of a value, right before the body, or here if that is None."""
        assert layout.value.dtype is not None
        zero = ir.tensor(np.zeros(1, layout.value.dtype.numpy()))
        shape = self.comm.derived_op(layout.group, "Shape", [like], like, "shape")
        value = self.job.derived_on(layout.group, like, ".zeros")
        self.comm.emit(layout.group, "ConstantOfShape", [shape], value, value=zero)
        self.comm.declare(layout, value)
        if body is not None:
            body.around += self.job.steps[-2:]
            del self.job.steps[-2:]
        return value

    def _declare(self, body: _Body, value: Value, dtype: ir.DataType, shape: Sequence[int | str | None]) -> None:
        of = ir.Value(name=str(value), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.job.declare(body.begin.group, value, *typed(self.values, self.program.symbols, of))
