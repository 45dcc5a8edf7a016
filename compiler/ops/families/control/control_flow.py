"""Branches and loops: every rank of the group runs the bodies as they are.

In the backward pass what a body does is done again beside its gradient, in a body of the same kind.

A body reads values of the graph around it, so what flows back is a cotangent for each of these, besides those of the operands.

    y = If(c) {t = Mul(h, w)} {e = Relu(h)}
    h.grad, w.grad = If(c) {Mul(dy, w), Mul(dy, h)} {Mul(dy, mask of h), zeros}

A Scan keeps the states that each turn begins with. Its gradient is a Scan over these from the last turn to the first, whose states are
the cotangents of the forward states and, for each value read from around, the sum so far. A Loop likewise has a Loop of as many turns
as were taken, whatever ended it, as long as its states keep their shapes. Nothing else of the inside of a body is kept: it is
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from partc.compiler.autodiff.builder import GradientBuilder, NoGradient
from partc.compiler.autodiff.engine import Bodies, Cotangents
from partc.compiler.autodiff.subgraph import Body
from partc.compiler.ir.graph import name_of, operand_name
from partc.compiler.ops.node import same
from partc.compiler.ops.registry import op

_WHY = "its bodies are run as they are"
BACKWARDS = 1
"""A direction of Scan: from the last turn to the first."""


branch = op("If", why=_WHY, rounds="sums")
scan = op("Scan", why=_WHY, rounds="sums")
loop = op("Loop", why=_WHY, rounds="sums")


@branch.body_gradient
def _(g: GradientBuilder, dys: Sequence[str | None], inside: Bodies) -> Cotangents:
    """Each branch gives the cotangents of all that either reads, zeros of what it does not."""
    wanted, path = list(inside.requested), _path(g)
    branches = []
    for name in ("then_branch", "else_branch"):
        body = Body.of(g, g.node.attributes[name].as_graph(), inside.names, f"{path}.grad.{name}", [])
        cotangents = {out: dy for out, dy in zip(body.outputs, dys, strict=True) if dy}
        made = body.gradient(cotangents, wanted)
        branches.append(ir.AttrGraph(name, body.graph(name, [], [made[one] for one in wanted])))
    return _emitted(g, "If", [_input(g, 0)], branches, wanted)


@scan.body_gradient
def _(g: GradientBuilder, dys: Sequence[str | None], inside: Bodies) -> Cotangents:
    """A Scan over the same elements from the last to the first; the states that each turn began with are kept by the forward one."""
    count, whole = g.attribute("num_scan_inputs"), len(g.node.inputs)
    states = whole - count
    outs = len(g.node.outputs) - states

    def along(kind: str, number: int) -> list[_Along]:
        axes = g.attribute(f"scan_{kind}_axes") or [0] * number
        directions = g.attribute(f"scan_{kind}_directions") or [0] * number
        return [_Along(axis, direction) for axis, direction in zip(axes, directions, strict=True)]

    elements = along("input", count)
    known = [_like(g, k) for k in range(states)]
    for k, one in enumerate(elements):
        value = g.scope.value(_input(g, states + k))
        dims = (
            None
            if value.shape is None
            else [dim for at, dim in enumerate(value.shape) if at != one.axis % len(value.shape)]
        )
        known.append(ir.Value(type=value.type, shape=None if dims is None else ir.Shape(dims)))
    body = Body.of(g, g.node.attributes["body"].as_graph(), inside.names, f"{_path(g)}.grad.body", known)
    turns = _Turns(g, body, list(range(states)), list(range(states)), elements, along("output", outs), 0)
    return turns.gradient(dys, inside)


@loop.body_gradient
def _(g: GradientBuilder, dys: Sequence[str | None], inside: Bodies) -> Cotangents:
    """A Loop over the turns that were taken, from the last to the first; their numbers and states are kept by the forward one."""
    states = list(range(2, len(g.node.inputs)))
    outs = [_Along()] * (len(g.node.outputs) - len(states))
    turn = ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    going = ir.Value(type=ir.TensorType(ir.DataType.BOOL), const_value=ir.tensor(np.array(True)))
    known = [turn, going, *(_like(g, k) for k in states)]
    body = Body.of(g, g.node.attributes["body"].as_graph(), inside.names, f"{_path(g)}.grad.body", known)
    return _Turns(g, body, [0, *states], states, [], outs, 1).gradient(dys, inside)


@dataclass(frozen=True)
class _Along:
    """The direction and axis in which a Scan iterates over a tensor."""

    axis: int = 0
    direction: int = 0


_Slices = dict[str, tuple[str, _Along]]
"""Maps each value of a body, a slice for each iteration, to the tensor of all slices."""


@dataclass(frozen=True)
class _Backwards:
    """The turns of a backward pass: `ports` of its body begin as `starts`, are handed on as `results`, and end as cotangents of `primals`.

    `slices`: what the body reads a slice of each turn. `stacked`: by what it makes each turn, the tensor whose cotangent these are.
    """

    starts: list[str]
    slices: _Slices
    ports: list[str]
    results: list[str]
    primals: list[str]
    stacked: _Slices


@dataclass
class _Turns:
    """A loop: `kept` are the body's inputs that the forward pass stores, `states` those that are handed from turn to turn.

    The body's outputs are `skipped` ones, the states, and what is stacked along `outs`; its last inputs go along `elements`.
    """

    g: GradientBuilder
    body: Body
    kept: list[int]
    states: list[int]
    elements: list[_Along]
    outs: list[_Along]
    skipped: int

    def gradient(self, dys: Sequence[str | None], inside: Bodies) -> Cotangents:
        """The turns from the last to the first."""
        g, body = self.g, self.body
        if len(self.states) + len(self.outs) + self.skipped != len(body.outputs):
            raise NoGradient(f"{g.node.op_type} leaves out outputs of its body")
        kept = self._keep(inside)
        first = len(g.node.inputs) - len(self.elements)
        reads = {first + k: body.inputs[first + k] for k in range(len(self.elements)) if g.wants(first + k)}
        dtypes = {k: g.scope.value(_input(g, k)).dtype for k in self.states}
        moving = [k for k, dtype in dtypes.items() if dtype is not None and dtype.is_floating_point()]
        ends = {k: body.outputs[self.skipped + at] for at, k in enumerate(self.states)}
        at_outputs = {at: dy for at, dy in enumerate(dys[len(self.states) :]) if dy}

        at_state = {k: body.fresh(f"state{k}.dy", g.scope.value(_input(g, k))) for k in moving}
        sums = {name: body.fresh(f"sum{at}", g.scope.value(name)) for at, name in enumerate(inside.requested)}
        at_out = {at: body.fresh(f"out{at}.dy", self._element(dy, self.outs[at])) for at, dy in at_outputs.items()}
        cotangents = {ends[k]: at_state[k] for k in moving}
        cotangents |= {body.outputs[self.skipped + len(self.states) + at]: name for at, name in at_out.items()}
        wanted = [*(body.inputs[k] for k in moving), *reads.values(), *inside.requested]
        of_wanted = body.gradient(cotangents, wanted)
        self._check_shapes(ends)
        totals = [
            body.add("Add", [sums[name], of_wanted[name]], f"sum{at}.next") for at, name in enumerate(inside.requested)
        ]

        slices: _Slices = {body.inputs[k]: (name, _Along()) for k, name in zip(self.kept, kept, strict=True)}
        slices |= {body.inputs[first + k]: (_input(g, first + k), along) for k, along in enumerate(self.elements)}
        slices |= {at_out[at]: (dy, self.outs[at]) for at, dy in at_outputs.items()}
        turns = _Backwards(
            starts=self._starts(dys, moving, inside.requested),
            slices=slices,
            ports=[*at_state.values(), *sums.values()],
            results=[*(of_wanted[body.inputs[k]] for k in moving), *totals],
            primals=[*(_input(g, k) for k in moving), *inside.requested],
            stacked={of_wanted[name]: (_input(g, k), self.elements[k - first]) for k, name in reads.items()},
        )
        found = self._loop(turns) if self.g.node.op_type == "Loop" else self._scan(turns)
        unread = {at for at, k in enumerate(moving) if not g.wants(k)}
        return [one for at, one in enumerate(found) if at not in unread]

    def _starts(self, dys: Sequence[str | None], moving: Sequence[int], wanted: Sequence[str]) -> list[str]:
        """The initial values of the states' cotangents, and of the sums for values read from the graph around."""
        g = self.g
        return [
            *(dys[self.states.index(k)] or g.zeros(_input(g, k)) for k in moving),
            *(g.zeros(name) for name in wanted),
        ]

    def _scan(self, turns: _Backwards) -> Cotangents:
        """The turns as a Scan."""
        graph = self.body.graph("body", [*turns.ports, *turns.slices], [*turns.results, *turns.stacked])
        read, written = ([along for _, along in some.values()] for some in (turns.slices, turns.stacked))
        attributes = [
            ir.AttrGraph("body", graph),
            ir.AttrInt64("num_scan_inputs", len(read)),
            ir.AttrInt64s("scan_input_axes", [one.axis for one in read]),
            ir.AttrInt64s("scan_input_directions", [BACKWARDS - one.direction for one in read]),
            ir.AttrInt64s("scan_output_axes", [one.axis for one in written]),
            ir.AttrInt64s("scan_output_directions", [BACKWARDS - one.direction for one in written]),
        ]
        operands = [*turns.starts, *(name for name, _ in turns.slices.values())]
        primals = [*turns.primals, *(name for name, _ in turns.stacked.values())]
        return _emitted(self.g, "Scan", operands, attributes, primals)

    def _loop(self, turns: _Backwards) -> Cotangents:
        """The turns as a Loop, which unlike a Scan may have none of them in onnxruntime."""
        g, body = self.g, self.body
        sources = [source for source, _ in turns.slices.values()]
        count = g.Gather(g.Shape(sources[0]), g.constant(0))
        last = g.Sub(count, g.constant(1))
        number = ir.Value(type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
        turn = body.fresh("turn", number)
        going = body.fresh("going", ir.Value(type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])))
        body.scope.know([g.scope.value(name) for name in (last, *sources)])
        at = body.first("Sub", [last, turn], body.scope.derived(f"{body.prefix}at"))
        for name, source in zip(turns.slices, sources, strict=True):
            body.first("Gather", [source, at], name)
        results = [body.add("Identity", [going], "going.next"), *turns.results]
        graph = body.graph("body", [turn, going, *turns.ports], results)
        return _emitted(g, "Loop", [count, "", *turns.starts], [ir.AttrGraph("body", graph)], turns.primals)

    def _keep(self, inside: Bodies) -> list[str]:
        """Has the forward node give what every turn begins with, stacked."""
        g, node = self.g, self.g.node
        graph = node.attributes["body"].as_graph().clone(allow_outer_scope_values=True)
        names = [g.scope.derived(f"{_path(g)}.turns{k}") for k in self.kept]
        for k, name in zip(self.kept, names, strict=True):
            source = graph.inputs[k]
            stacked = ir.Value(
                name=g.scope.derived(f"{name}.one"), type=source.type or self.body.scope.value(self.body.inputs[k]).type
            )
            graph.append(ir.Node("", "Identity", [source], outputs=[stacked], name=stacked.name))
            graph.outputs.append(stacked)
        changed = {"body": ir.AttrGraph("body", graph)}
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in node.attributes:
                changed[name] = ir.AttrInt64s(name, [*node.attributes[name].as_ints(), *[0] * len(names)])
        attributes = [changed.get(one.name, one) for one in node.attributes.values()]
        outputs = [operand_name(value) for value in node.outputs]
        operands = [operand_name(value) for value in node.inputs]
        inside.forward = g.scope.node(node.op_type, operands, [*outputs, *names], attributes)
        inside.forward.name = node.name
        for k, stacked in zip(self.kept, inside.forward.outputs[len(outputs) :], strict=True):
            kept_value = self.body.scope.value(self.body.inputs[k])
            stacked.type = kept_value.type
            if kept_value.shape is not None:
                turns = ir.SymbolicDim(None)
                stacked.shape = ir.Shape([turns, *kept_value.shape.dims])
            g.scope.values[name_of(stacked)] = stacked
        return names

    def _element(self, name: str, along: _Along) -> ir.Value:
        """A value with the type and shape of the element of a stack that one iteration reads."""
        value = self.g.scope.value(name)
        if value.shape is None:
            return value
        axis = along.axis % len(value.shape)
        return ir.Value(type=value.type, shape=ir.Shape([dim for at, dim in enumerate(value.shape) if at != axis]))

    def _check_shapes(self, ends: dict[int, str]) -> None:
        """The states of all turns must lie in one tensor."""
        for at, (k, end) in enumerate(ends.items()):
            begin, after = (self.body.scope.value(name).shape for name in (self.body.inputs[k], end))
            known = begin is not None and after is not None and len(begin) == len(after)
            if not known or not all(map(same, begin or (), after or ())):
                shapes = f"it begins as {begin}, and a turn makes {after} of it"
                raise NoGradient(
                    f"state {at} of {self.g.node.op_type} may change its shape from turn to turn: {shapes}"
                )


def _emitted(
    g: GradientBuilder, op_type: str, operands: Sequence[str], attributes: Sequence[ir.Attr], primals: Sequence[str]
) -> list[tuple[str, str]]:
    """A node that gives one cotangent for each primal, in its type and shape."""
    names = [f"{_path(g)}.grad.{at}" for at in range(len(primals))]
    node = g.scope.node(op_type, operands, names, attributes)
    g.scope.add(node)
    for out, name in zip(node.outputs, primals, strict=True):
        like = g.scope.value(name)
        out.type, out.shape = like.type, like.shape
    return list(zip(primals, names, strict=True))


def _path(g: GradientBuilder) -> str:
    return next(value.name for value in g.node.outputs if value.name)


def _input(g: GradientBuilder, k: int) -> str:
    value = g.node.inputs[k]
    assert value is not None
    return name_of(value)


def _like(g: GradientBuilder, k: int) -> ir.Value:
    value = g.scope.value(_input(g, k))
    return ir.Value(type=value.type, shape=value.shape)
