"""Unrolls bodies before any pass: a Scan or Loop with a known number of turns that a plan's rules name, and an If with a known condition.

    layers = Scan(x, weights [12, 64, 64]) {h = MatMul(x, w)}   ->   layers.0.w, layers.1.w, ... = Split(weights)
                                                                     layers.0.h = MatMul(x, layers.0.w)
                                                                     layers.1.h = MatMul(layers.0.h, layers.1.w)

A node of turn k keeps its name in the body, within `layers.k`, so rules place and shard it like any other node. The number of turns and the
branch are computed here from constants: integers and booleans, such as the counter of a `while`. A body that no rule names stays as it is.
A body that cannot be unrolled has the reason in its metadata (`UNKNOWN_TURNS`), which the refusal of a rule quotes.

A weight that turns read slice by slice, or by their number, becomes one weight for each turn. In a training it is a part of the stack
(`rewrite/packed.py`), so checkpoints are the same with and without unrolling; otherwise it is a separate weight from the beginning.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from partc.compiler.analysis.infer_shapes import infer_shapes
from partc.compiler.frontend.functions import CALLS
from partc.compiler.frontend.names import ONNXSCRIPT_SCOPES, TORCH_SCOPES, body_paths, free_name, node_paths
from partc.compiler.frontend.source import Source
from partc.compiler.ir.computed import AbsentTensor, Box, ComputedTensor, WidenedTensor, full_box, is_absent, shard_of
from partc.compiler.ir.graph import (
    GRADIENT_FORM,
    OF_ALL_TURNS,
    OF_TURNS,
    OWN_BACKWARD,
    STOPS_GRADIENT,
    UNKNOWN_TURNS,
    add_initializer,
    bodies,
    name_of,
    nodes_of,
    take_out,
)
from partc.compiler.ir.value_info import Array
from partc.compiler.matching import matched_nodes
from partc.compiler.ops.families.control.bodies import (
    BEGIN,
    CARRIED,
    CARRY,
    EITHER,
    END,
    IF,
    KIND,
    LOOP,
    OTHERWISE,
    STACK,
)
from partc.compiler.ops.registry import draws
from partc.compiler.ops.rule import OWN
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.rules import Plan
from partc.compiler.rewrite.evaluation import KnownNumbers
from partc.compiler.start import start

_Origin: TypeAlias = tuple[str, ...]
_ALL_TURNS = "name all turns by '*'"
MOST_NODES = 20_000
"""The most nodes that unrolling adds."""
_EAGER = 1 << 16
"""The bytes up to which the elements of a stack are copied in memory; of a larger stack they are read when they are written."""
_WITH_BODIES = frozenset({"If", "Loop", "Scan"})
_OWN_NAME = re.compile(r"(If|Loop|Scan)(_\d+)?")
_NOT_CUT = "in a generation or a pipeline, nor with microbatches, recomputed nodes or stored parameters"
_NEWER_AXES = 13
"""The opset from which Split, Squeeze and Unsqueeze read their sizes and axes from an input."""


def unrolled(source: Source, plan: Plan | None, name: str) -> Source:
    """Returns the source with each If of a constant condition replaced by its branch, and the loops unrolled in which the plan names a
    node.

    Returns the source itself if it has neither.
    """
    if not any(node.op_type in _WITH_BODIES for node in source.model.graph):
        return source
    patterns = [] if plan is None else [*dict.fromkeys(_patterns(plan))]
    unstacks = plan is not None and (
        plan.train is None or bool(plan.adapters)
    )  # else the stack is a parameter, of which these are parts
    keeps = plan is not None and plan.generate is None and plan.pipeline is None and not plan.stored.rules
    work = _Unrolling(source.model, None if patterns else frozenset(), unstacks=unstacks, keeps=keeps)
    if plan is not None and patterns:
        named = work.named_by(patterns, source, plan, name)
        if named != work.loops:
            long = work.long
            work = _Unrolling(source.model, named, unstacks=unstacks, keeps=keeps)
            for node in work.graph:
                if (path := work.paths.get(node, "")) in long and node.op_type in _WITH_BODIES:
                    node.metadata_props[UNKNOWN_TURNS] = long[path]
    return replace(source, model=work.model)


def layers_unrolled(source: Source) -> Source:
    """Returns the source with the loops unrolled whose turns read slices of weights: layers, which a proposed plan names one by one."""
    if not any(node.op_type in _WITH_BODIES for node in source.model.graph):
        return source
    whole = _Unrolling(source.model)
    splits = {node: node.inputs[0] for node in whole.graph if OF_TURNS in node.metadata_props}
    layers = {whole.origins[node][-1] for node, stack in splits.items() if stack is not None and stack.is_initializer()}
    return replace(source, model=_Unrolling(source.model, frozenset(layers)).model)


def _patterns(plan: Plan) -> Iterator[str]:
    """Yields the patterns of a plan that name modules and nodes."""
    for one in (plan.placement, plan.sharding, plan.quantize, plan.target):
        yield from map(operator.attrgetter("pattern"), one)
    yield from (rule.entry.on for rule in plan.adapters if rule.entry.on is not None)
    if plan.pipeline is not None:
        yield from (pattern for stage in plan.pipeline.stages for pattern, _ in stage.patterns)
        yield from (pattern for rule in plan.pipeline.recompute for pattern in rule.patterns)


@dataclass(frozen=True)
class _Stay:
    """The reason for which a body stays as it is, and the remedy."""

    reason: str
    help: str = ""


class _Unrolling:
    """A copy of a model in which bodies are unrolled: all that can be, or those of the nodes whose paths are in `only`.

    `unstacks`: whether the elements of a stack of weights that turns read become separate weights. `keeps`: whether a body whose turns or
    branch only the run knows is written between borders (`ops/families/control/bodies.py`), once.

    `loops`: the paths of the model's loops that are unrolled, and of nodes whose bodies are between borders.
    """

    def __init__(
        self, source: ir.Model, only: frozenset[str] | None = None, *, unstacks: bool = False, keeps: bool = False
    ) -> None:
        self.model = source.clone()
        self.model.meta.update(source.meta)
        self.unstacks, self.keeps, self.only = unstacks, keeps, only
        self.long: dict[str, str] = {}
        """Maps the path of each loop that is too long to be unrolled to the reason and the remedy."""
        self.loops: frozenset[str] = frozenset()
        self.numbers = KnownNumbers(self.opset)
        self.origins: dict[ir.Node, _Origin] = {}
        """Maps each node that was in a body to the paths of the nodes that had the body, or are around them: inner ones first."""
        self.paths = node_paths(self.model)
        self.initializers: dict[ir.Value, ir.Value] = {}
        """Maps the initializers of bodies to those of the main graph."""
        self.constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self.replaced: dict[ir.Value, ir.Value] = {}
        """Maps each replaced value to the value that its readers now read."""
        self.several: set[str] = set()
        """The modules with several nodes with bodies: the turns of one are not named by the module alone."""
        self.value_names = {name_of(value) for value in (*self.graph.inputs, *self.graph.initializers.values())}
        self.value_names |= {value.name or "" for node in nodes_of(self.graph) for value in node.outputs}
        self.node_names = set(self.paths.values())
        self.budget = MOST_NODES
        _learn_shapes(self.model)
        first = [node for node in self.graph if node.op_type in _WITH_BODIES]
        self._note_several(first)
        for node in first:
            if only is None or node.op_type == "If" or self.paths[node] in only:
                self.budget = MOST_NODES
                self._write_out(node, (self.paths[node],))
        self._drop_unread()
        self._unstack()
        self._drop_unread()

    @property
    def graph(self) -> ir.Graph:
        """The main graph."""
        return self.model.graph

    @property
    def opset(self) -> int:
        """The version of the standard's ops."""
        imports = self.graph.opset_imports
        return imports.get("", imports.get("ai.onnx", 1))

    def named_by(self, patterns: Sequence[str], source: Source, plan: Plan, name: str) -> frozenset[str]:
        """The paths of the model's loops that have a node in their body that a pattern names, and are not themselves named by it."""
        program = start(replace(source, model=self.model), replace(plan, train=None, generate=None), name)
        hit = set[str]()
        for pattern in patterns:
            matches = compile_pattern(pattern).matches
            nodes = (node for node in matched_nodes(program, pattern) if node in self.origins)
            for origin in dict.fromkeys(self.origins[node] for node in nodes):
                hit.update(origin[: next((k for k, path in enumerate(origin) if matches(path)), len(origin))])
        return frozenset(hit) & self.loops

    def _write_out(self, node: ir.Node, origin: _Origin) -> None:
        """Unrolls the bodies of a node, and those of the nodes in them."""
        before, path = self.budget, self.paths[node]
        match node.op_type:
            case "If":
                why = self._branch(node, origin)
            case "Loop":
                why = self._loop(node, origin)
            case _:
                why = self._scan(node, origin)
        if why is None:
            self.loops |= {origin[0]} if node.op_type != "If" or origin[0] != path else frozenset()
            return
        self.budget = before
        if why.help.startswith(_ALL_TURNS):
            self.long[path] = f"{why.reason}\n{why.help}"
        if not self.keeps:
            why = replace(why, reason=f"{why.reason}; and it is not cut as a body {_NOT_CUT}")
        elif self.only is None or path in self.only:
            refused = self._keep(node, origin if origin[0] == path else (path, *origin))
            if refused is None:
                self.loops |= {path}
                return
            why = refused
        else:
            return
        node.metadata_props[UNKNOWN_TURNS] = f"{why.reason}\n{why.help}"

    def _branch(self, node: ir.Node, origin: _Origin) -> _Stay | None:
        """Replaces an If by the branch that runs."""
        condition = self.numbers.of(node.inputs[0])
        if condition is None:
            return _Stay("only the run says which branch there is", "take the node out of the branch")
        if any(use.node.op_type == "Range" for value in node.outputs for use in value.uses()):
            return _Stay(
                "a Range reads its result, and onnxruntime may refuse the shape that the branch gives it",
                "take the node out",
            )
        name = "then_branch" if condition.all() else "else_branch"
        made = self._inlined(node, name, [], self._base(node), origin)
        self._replace(node, made)
        return None

    def _loop(self, node: ir.Node, origin: _Origin) -> _Stay | None:
        """Replaces a Loop by its turns."""
        body = node.attributes["body"].as_graph()
        turns = self._turns(node, body)
        states: Sequence[ir.Value | None] = node.inputs[2:]
        stacked = len(body.outputs) - len(node.inputs) + 1
        if isinstance(turns, int) and not turns and stacked:
            return _Stay("it has no turn, and stacks what turns make")
        if isinstance(turns, _Stay) or (why := self._drawing(body)) is not None:
            return turns if isinstance(turns, _Stay) else why
        base, rank = self._base(node), len(body.inputs[0].shape or ())
        stacks: list[list[ir.Value]] = [[] for _ in range(stacked)]
        going = self._constant(np.full([1] * len(body.inputs[1].shape or ()), True), f"{base}.going")
        for k in range(turns):
            turn = self._constant(np.full([1] * rank, k, np.int64), f"{base}.{k}.turn")
            made = self._inlined(node, "body", [turn, going, *states], f"{base}.{k}", origin)
            states = made[1 : 1 + len(states)]
            for at, value in enumerate(made[1 + len(states) :]):
                stacks[at].append(self._unsqueezed(node, value, 0, f"{base}.{k}.out{at}", origin))
        results = [self._joined(node, stack, 0, f"{base}.out{at}", origin) for at, stack in enumerate(stacks)]
        self._replace(node, [*states, *results])
        return None

    def _turns(self, node: ir.Node, body: ir.Graph) -> int | _Stay:
        """The number of turns of a Loop, from its trip count, and from its condition after each turn."""
        most = None if node.inputs[0] is None else self.numbers.of(node.inputs[0])
        if node.inputs[0] is not None and most is None:
            return _Stay("only the run says how many turns there are", "give it a constant trip count")
        limit = None if most is None else int(most.item())
        going = np.array(True) if node.inputs[1] is None else self.numbers.of(node.inputs[1])
        states, turns, size = [self.numbers.of(value) for value in node.inputs[2:]], 0, _extent(body)
        while going is not None and going.all() and (limit is None or turns < limit):
            turns += 1
            if turns * size > self.budget:
                return self._too_long("more than " * (limit is None) + f"{limit or turns:,}", size)
            rank = len(body.inputs[0].shape or ())
            memo: dict[ir.Value, Array | None] = dict(zip(body.inputs[2:], states, strict=True))
            memo |= {body.inputs[0]: np.full([1] * rank, turns - 1, np.int64), body.inputs[1]: going}
            going, *states = (self.numbers.of(value, memo) for value in body.outputs[: 1 + len(states)])
        return turns if going is not None else _Stay("only the run says after how many turns its condition ends it")

    def _scan(self, node: ir.Node, origin: _Origin) -> _Stay | None:
        """Replaces a Scan by its turns."""
        body, count = node.attributes["body"].as_graph(), node.attributes["num_scan_inputs"].as_int()
        first = len(node.inputs) - count
        states: Sequence[ir.Value | None] = node.inputs[:first]
        operands = [value for value in node.inputs[first:] if value is not None]
        outs = len(node.outputs) - first
        if self.opset < 9 or len(operands) < count or len(body.outputs) != first + outs:
            return _Stay("it has a form of opset 8")
        in_axes, in_turned, out_axes, out_turned = _directions(node, count, outs)
        sizes = {value: _size(value, axis) for value, axis in zip(operands, in_axes, strict=True)}
        turns = next((size for size in sizes.values() if size is not None), None)
        if turns is None or turns == 0:
            value = operands[0]
            reason = (
                f"only the run says how long '{value.name}' is along axis {in_axes[0]}, and how many turns there are"
            )
            return _Stay("it has no turn" if turns == 0 else reason, "give this dim a fixed size in the model")
        if turns * _extent(body) > self.budget:
            return self._too_long(f"{turns:,}", _extent(body))
        if (why := self._drawing(body)) is not None:
            return why
        base = self._base(node)
        labels = [
            name_of(value).removeprefix(f"{base}.") if value.is_initializer() else f"in{at}"
            for at, value in enumerate(operands)
        ]
        elements = [
            self._elements(node, value, axis % len(value.shape or ()), turns, base, label, origin)
            for value, axis, label in zip(operands, in_axes, labels, strict=True)
        ]
        stacks: list[list[ir.Value]] = [[] for _ in range(outs)]
        for k in range(turns):
            given = [some[turns - 1 - k if turned else k] for some, turned in zip(elements, in_turned, strict=True)]
            made = self._inlined(node, "body", [*states, *given], f"{base}.{k}", origin)
            states = made[:first]
            for at, value in enumerate(made[first:]):
                stacks[at].append(self._unsqueezed(node, value, out_axes[at], f"{base}.{k}.out{at}", origin))
        results = [
            self._joined(node, stack[::-1] if turned else stack, axis, f"{base}.out{at}", origin)
            for at, (stack, axis, turned) in enumerate(zip(stacks, out_axes, out_turned, strict=True))
        ]
        self._replace(node, [*states, *results])
        return None

    def _keep(self, node: ir.Node, origin: _Origin) -> _Stay | None:
        """Replaces a node by its bodies between borders, which run as often, or that of them, as the run says."""
        if any(not isinstance(value.type, ir.TensorType) for body in bodies(node) for value in body.outputs):
            return _Stay("its body gives what is not a tensor", "take the node out of the body")
        for body in bodies(node):
            if (why := self._drawing(body)) is not None:
                return why
        if node.op_type == "If":
            self._replace(node, self._bordered_branches(node, origin))
            return None
        if any(value is None for value in node.inputs[2 if node.op_type == "Loop" else 0 :]):
            return _Stay("it leaves out an input", "give it")
        if node.op_type == "Scan" and (
            self.opset < _NEWER_AXES or len(node.outputs) != len(node.attributes["body"].as_graph().outputs)
        ):
            return _Stay("it has a form of opset 8", "export the model with a newer opset")
        self._replace(
            node, self._bordered_scan(node, origin) if node.op_type == "Scan" else self._bordered_turns(node, origin)
        )
        return None

    def _bordered_branches(self, node: ir.Node, origin: _Origin) -> list[ir.Value]:
        """Inserts both branches of an If between borders before it; returns the results."""
        base = self._base(node)
        (taken,) = self._border(node, origin, BEGIN, [node.inputs[0]], IF, "begin").outputs
        one = self._inlined(node, "then_branch", [], f"{base}.then_branch", origin)
        (other,) = self._border(node, origin, OTHERWISE, [taken], IF, "otherwise").outputs
        two = self._inlined(node, "else_branch", [], f"{base}.else_branch", origin)
        (ended,) = self._border(node, origin, END, [taken, other], IF, "end").outputs
        pairs = enumerate(zip(one, two, strict=True))
        return [self._border(node, origin, EITHER, [*pair, ended], IF, f"out{at}").outputs[0] for at, pair in pairs]

    def _bordered_turns(self, node: ir.Node, origin: _Origin) -> list[ir.Value]:
        """Inserts a turn of a Loop between borders before it; returns the results."""
        body, states = node.attributes["body"].as_graph(), node.inputs[2:]
        ranks = {
            f"{word}_rank": len(value.shape or ()) for word, value in zip(("int64", "bool"), body.inputs, strict=False)
        }
        turn, going = self._border(node, origin, BEGIN, node.inputs[:2], LOOP, "begin", **ranks).outputs
        begun = [
            self._border(node, origin, CARRY, [value, turn], LOOP, f"state{at}").outputs[0]
            for at, value in enumerate(states)
        ]
        more, *turn_results = self._inlined(node, "body", [turn, going, *begun], f"{self._base(node)}.body", origin)
        (ended,) = self._border(node, origin, END, [more, turn], LOOP, "end").outputs
        pairs = zip(turn_results, begun, strict=False)
        results = [
            self._border(node, origin, CARRIED, [*pair, ended], LOOP, f"last{at}").outputs[0]
            for at, pair in enumerate(pairs)
        ]
        stacks = enumerate(turn_results[len(states) :])
        return results + [
            self._border(node, origin, STACK, [one, ended], LOOP, f"out{at}").outputs[0] for at, one in stacks
        ]

    def _bordered_scan(self, node: ir.Node, origin: _Origin) -> list[ir.Value]:
        """Inserts a turn of a Scan between borders before it, as that of a Loop which takes its elements by their number."""
        base, count = self._base(node), node.attributes["num_scan_inputs"].as_int()
        first, outs = len(node.inputs) - count, len(node.outputs) - len(node.inputs) + count
        in_axes, in_turned, out_axes, out_turned = _directions(node, count, outs)
        operands = [value for value in node.inputs if value is not None]
        at = in_axes[0] % len(operands[first].shape or ())
        sizes = self._put(node, "Shape", [operands[first]], f"{base}.sizes", origin).outputs[0]
        total = self._put(
            node, "Gather", [sizes, self._constant(np.array(at), f"{base}.axis")], f"{base}.turns", origin
        ).outputs[0]
        turn, _ = self._border(node, origin, BEGIN, [total, None], LOOP, "begin", int64_rank=0, bool_rank=0).outputs
        begun = [
            self._border(node, origin, CARRY, [value, turn], LOOP, f"state{k}").outputs[0]
            for k, value in enumerate(operands[:first])
        ]
        numbers = [turn]
        if any(in_turned):
            one = self._constant(np.array(1), f"{base}.one")
            left = self._put(node, "Sub", [total, one], f"{base}.body.left", origin).outputs[0]
            numbers.append(self._put(node, "Sub", [left, turn], f"{base}.body.at", origin).outputs[0])
        elements = [
            self._put(node, "Gather", [value, numbers[turned]], f"{base}.body.in{k}", origin, axis=axis).outputs[0]
            for k, (value, axis, turned) in enumerate(zip(operands[first:], in_axes, in_turned, strict=True))
        ]
        turn_results = self._inlined(node, "body", [*begun, *elements], f"{base}.body", origin)
        on = self._constant(np.array(True), f"{base}.on")
        (ended,) = self._border(node, origin, END, [on, turn], LOOP, "end").outputs
        results = [
            self._border(node, origin, CARRIED, [*pair, ended], LOOP, f"last{k}").outputs[0]
            for k, pair in enumerate(zip(turn_results, begun, strict=False))
        ]
        dim = (operands[first].shape or ())[at]
        length = "" if dim is None else str(getattr(dim, "value", dim) or "")
        for k, (value, axis, turned) in enumerate(zip(turn_results[first:], out_axes, out_turned, strict=True)):
            stack = self._border(node, origin, STACK, [value, ended], LOOP, f"out{k}", length=length).outputs[0]
            if turned:
                ends = ((-1,), (np.iinfo(np.int64).min,), (0,), (-1,))
                bounds = [
                    self._constant(np.array(end), f"{base}.from_{word}")
                    for word, end in zip(("begin", "end", "axis", "step"), ends, strict=True)
                ]
                stack = self._put(node, "Slice", [stack, *bounds], f"{base}.out{k}.turned", origin).outputs[0]
            rank = len(node.outputs[first + k].shape or ())
            if axis % rank:
                order = [*range(1, 1 + axis % rank), 0, *range(1 + axis % rank, rank)]
                stack = self._put(node, "Transpose", [stack], f"{base}.out{k}.moved", origin, perm=order).outputs[0]
            results.append(stack)
        return results

    def _border(
        self,
        before: ir.Node,
        origin: _Origin,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        kind: str,
        name: str,
        **attributes: int | str,
    ) -> ir.Node:
        """Inserts a border of a node's bodies before it, called `name` in its module."""
        extra = ir.convenience.convert_attributes({KIND: kind, **attributes})
        count = 2 if op_type == BEGIN and kind == LOOP else 1
        border = ir.Node(OWN, op_type, inputs, extra, num_outputs=count, version=1)
        border.metadata_props.update(before.metadata_props)
        if op_type == CARRIED:
            border.meta[OF_ALL_TURNS] = True
        self.graph.insert_before(before, border)
        self._name(border, f"{self._base(before)}.{name}", origin)
        return border

    def _too_long(self, turns: str, size: int) -> _Stay:
        written = "" if self.budget == MOST_NODES else f", of which {self.budget:,} are left here"
        reason = f"it has {turns} turns of {size:,} node{'s' * (size != 1)}, and a body is written out into at most {MOST_NODES:,}{written}"
        return _Stay(reason, f"{_ALL_TURNS}, or take fewer turns a loop")

    def _drawing(self, body: ir.Graph) -> _Stay | None:
        """The reason for which a body stays that draws random numbers from one seed: unrolled turns would all draw the same numbers."""
        for node in nodes_of(body):
            if draws(node) and "seed" in node.attributes:
                fact = f"its {node.op_type} draws on from turn to turn with one seed, and written out each turn would begin with it"
                return _Stay(fact, "leave out the seed")
        return None

    def _inlined(
        self, node: ir.Node, attribute: str, values: Sequence[ir.Value | None], base: str, origin: _Origin
    ) -> list[ir.Value]:
        """Inserts the nodes of a body before `node`, with `values` for its inputs, in the module `base`; returns the body's results."""
        body, path = node.attributes[attribute].as_graph(), self.paths[node]
        names = body_paths(body, path.rpartition(".")[0], f"{path}.{attribute}.")
        copy = body.clone(allow_outer_scope_values=True)
        by_input = dict(zip(copy.inputs, values, strict=True))
        for own, value in zip(body.initializers.values(), copy.initializers.values(), strict=True):
            by_input[value] = self._hoisted(own)
        results, nodes = list(copy.outputs), list(copy)
        copy.outputs.clear()
        copy.initializers.clear()
        for old, new in by_input.items():
            if new is not None:
                self._forward(old, new)
        copy.remove(nodes)
        self.graph.insert_before(node, nodes)
        self.budget -= len(nodes)
        for inner, written in zip(nodes, body, strict=True):
            self._name(inner, f"{base}.{names[written]}", origin, written.name or "")
            out = inner.outputs[0]
            if len(inner.outputs) == 1 and (number := self.numbers.of(out)) is not None:
                self._forward(out, self._constant(number, name_of(out)))
            elif (weight := _handed_on(inner)) is not None:
                self._forward(out, weight)
        self._note_several(nodes)
        for inner in nodes:
            if inner.op_type in _WITH_BODIES:
                self._write_out(inner, origin)
        return [self._now(value) for value in results]

    def _forward(self, old: ir.Value, new: ir.Value) -> None:
        """Makes all readers of `old` read `new`."""
        old.replace_all_uses_with(new)
        self.replaced[old] = new

    def _now(self, value: ir.Value) -> ir.Value:
        """The value that now stands for a value."""
        while value in self.replaced:
            value = self.replaced[value]
        return value

    def _hoisted(self, value: ir.Value) -> ir.Value:
        """The main graph's initializer for an initializer of a body, shared by all turns."""
        if value not in self.initializers:
            name = (
                free_name(name_of(value), self.value_names)
                if name_of(value) in self.graph.initializers
                else name_of(value)
            )
            tensor = value.const_value
            assert tensor is not None
            self.initializers[value] = add_initializer(self.graph, name, tensor)
            self.initializers[value].meta.update(value.meta)
            self.value_names.add(name)
        return self.initializers[value]

    def _name(self, node: ir.Node, path: str, origin: _Origin, old: str = "") -> None:
        """Gives a node a path, and its results and the values in its bodies names within that path."""
        path = free_name(path, self.node_names)
        scope, _, own = path.rpartition(".")
        node.name, self.paths[node], self.origins[node] = path, path, origin
        node.meta.pop(CALLS, None)
        if TORCH_SCOPES in node.metadata_props:
            node.metadata_props[TORCH_SCOPES] = repr(["", scope, own])
        elif ONNXSCRIPT_SCOPES in node.metadata_props:
            node.metadata_props[ONNXSCRIPT_SCOPES] = repr(["", scope])
        for k, value in enumerate(node.outputs):
            if value.name != "":
                value.name = free_name(path if len(node.outputs) == 1 else f"{path}.{k}", self.value_names)
        for body in bodies(node):
            for value in (*body.inputs, *body.initializers.values()):
                value.name = free_name(f"{path}.{value.name}", self.value_names)
        for inner in nodes_of([body for graph in bodies(node) for body in graph]):
            if old and (inner.name or "").startswith(f"{old}."):
                inner.name = f"{path}{(inner.name or '').removeprefix(old)}"
            for value in inner.outputs:
                if value.name:
                    value.name = free_name(f"{path}.{value.name}", self.value_names)

    def _put(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value],
        path: str,
        origin: _Origin,
        **attributes: int | list[int],
    ) -> ir.Node:
        """Inserts a node of one result before another node."""
        extra = ir.convenience.convert_attributes(attributes)
        node = ir.Node("", op_type, inputs, extra)
        node.metadata_props.update(before.metadata_props)
        self.graph.insert_before(before, node)
        self._name(node, path, origin)
        return node

    def _elements(
        self, before: ir.Node, value: ir.Value, axis: int, turns: int, base: str, label: str, origin: _Origin
    ) -> list[ir.Value]:
        """The slices of a value along an axis, one for each turn."""
        alone = value.is_initializer() and len(list(value.uses())) == 1
        tensor = value.const_value if self.unstacks and alone else None
        if tensor is not None and not isinstance(tensor, WidenedTensor):
            return [self._weight(_element(tensor, axis, k, f"{base}.{k}.{label}")) for k in range(turns)]
        slices, older = [value], self.opset < _NEWER_AXES
        if turns > 1:
            sizes = [] if older else [self._constant(np.ones(turns, np.int64), f"{base}.{label}.sizes")]
            node = ir.Node("", "Split", [value, *sizes], [ir.AttrInt64("axis", axis)], num_outputs=turns)
            if older:
                node.attributes["split"] = ir.AttrInt64s("split", [1] * turns)
            node.metadata_props.update(before.metadata_props)
            node.metadata_props[OF_TURNS] = str(axis)
            self.graph.insert_before(before, node)
            self._name(node, f"{base}.{label}", origin)
            slices = list(node.outputs)
        return [
            self._with_axis("Squeeze", before, some, axis, f"{base}.{k}.{label}", origin)
            for k, some in enumerate(slices)
        ]

    def _unstack(self) -> None:
        """Gives turns that look up their weights in a stack by their number separate weights, or marks the lookups."""
        for stack in list(self.graph.initializers.values()):
            readers = [use.node for use in stack.uses() if use.idx == 0]
            rows = [self._row(node) for node in readers]
            axes = {row[0] for row in rows if row is not None}
            tensor = stack.const_value
            if len(axes) != 1 or None in rows or len(readers) < len(list(stack.uses())) or tensor is None:
                continue
            if not self.unstacks or isinstance(tensor, WidenedTensor):
                for node in readers:
                    node.metadata_props[OF_TURNS] = str(*axes)
                continue
            weights: dict[tuple[int, int, bool], ir.Value] = {}
            for node, row in zip(readers, rows, strict=True):
                if row is not None and row not in weights:
                    weights[row] = self._weight(_element(tensor, *row[:2], f"{name_of(stack)}.{row[1]}", keeps=row[2]))
                if row is not None:
                    self._forward(node.outputs[0], weights[row])

    def _row(self, node: ir.Node) -> tuple[int, int, bool] | None:
        """The axis and index of the element that a node of a turn takes from its operand, and whether the axis stays, or None."""
        shape = None if node.inputs[0] is None else node.inputs[0].shape
        if (
            node not in self.origins
            or shape is None
            or not shape.is_static()
            or node.op_type not in ("Gather", "Slice")
        ):
            return None
        numbers = [self.numbers.of(value) for value in node.inputs[1:]]
        sizes = shape.numpy()
        if node.op_type == "Gather":
            (at,), axis = numbers, node.attributes.get_int("axis", 0) % len(sizes)
            return (axis, int(at) % sizes[axis], False) if at is not None and at.ndim == 0 else None
        if len(numbers) != 3 or any(one is None for one in numbers):
            return None
        taken = list(zip(*(one.ravel().tolist() for one in numbers if one is not None), strict=False))
        ranges = {axis % len(sizes): range(*slice(begin, end).indices(sizes[axis])) for begin, end, axis in taken}
        cut = {axis: places for axis, places in ranges.items() if len(places) < sizes[axis]}
        if len(cut) != 1 or len(places := next(iter(cut.values()))) != 1:
            return None
        if len(taken) > 1:  # the others take all of their dims
            kept = [one for one in taken if one[2] % len(sizes) in cut]
            for k, number in enumerate(kept[0]):
                node.replace_input_with(k + 1, self._constant(np.array([number]), f"{node.name}.bound{k}"))
        return next(iter(cut)), places[0], True

    def _weight(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Adds a weight to the model."""
        return add_initializer(self.graph, free_name(str(tensor.name), self.value_names), tensor)

    def _unsqueezed(self, before: ir.Node, value: ir.Value, axis: int, path: str, origin: _Origin) -> ir.Value:
        return self._with_axis("Unsqueeze", before, value, axis, path, origin)

    def _with_axis(
        self, op_type: str, before: ir.Node, value: ir.Value, axis: int, path: str, origin: _Origin
    ) -> ir.Value:
        if self.opset < _NEWER_AXES:
            node = self._put(before, op_type, [value], path, origin)
            node.attributes["axes"] = ir.AttrInt64s("axes", [axis])
        else:
            node = self._put(before, op_type, [value, self._constant(np.array([axis]), f"{path}.axes")], path, origin)
        return node.outputs[0]

    def _joined(self, before: ir.Node, values: Sequence[ir.Value], axis: int, path: str, origin: _Origin) -> ir.Value:
        return self._put(before, "Concat", values, path, origin, axis=axis).outputs[0]

    def _replace(self, node: ir.Node, results: Sequence[ir.Value | None]) -> None:
        """Makes the readers of a node's results read other values, and removes the node; an output of the model keeps its name."""
        for old, new in zip(node.outputs, results, strict=True):
            if new is None or old.name == "":
                continue
            name = name_of(old)
            if old.is_graph_output():
                old.name = free_name(f"{name}.whole", self.value_names)
                if new.producer() not in self.origins or new.is_graph_output():
                    new = self._put(node, "Identity", [new], f"{self._base(node)}.{name}", (self.paths[node],)).outputs[
                        0
                    ]
                new.name, new.type, new.shape = name, new.type or old.type, new.shape or old.shape
                for k, value in enumerate(self.graph.outputs):
                    if value is old:
                        self.graph.outputs[k] = new
            self._forward(old, new)
        take_out(self.graph, node)

    def _constant(self, numbers: Array, name: str) -> ir.Value:
        """An initializer with these numbers, shared by all turns."""
        key = numbers.dtype.str, numbers.shape, numbers.tobytes()
        if key in self.constants:
            return self.constants[key]
        name = free_name(name, self.value_names) if name in self.graph.initializers else name
        self.value_names.add(name)
        value = add_initializer(self.graph, name, ir.Tensor(numbers, name=name))
        self.numbers.memo[value] = numbers
        self.constants[key] = value
        return value

    def _base(self, node: ir.Node) -> str:
        """The module of a node's unrolled body: the one around the node if the node is alone there under its op's name, else its path."""
        module, _, own = self.paths[node].rpartition(".")
        return module if module and module not in self.several and _OWN_NAME.fullmatch(own) else self.paths[node]

    def _note_several(self, nodes: Sequence[ir.Node]) -> None:
        modules = [self.paths[node].rpartition(".")[0] for node in nodes if node.op_type in _WITH_BODIES]
        self.several |= {module for module in modules if modules.count(module) > 1}

    def _drop_unread(self) -> None:
        """Removes nodes and constants that only computed the number of turns or the branch."""
        for node in reversed(list(self.graph)):
            if node.domain == OWN or node not in self.origins:
                continue
            if not any(out.uses() or out.is_graph_output() for out in node.outputs):
                take_out(self.graph, node)
        for value in [value for value in self.numbers.memo if value.is_initializer() and not value.uses()]:
            if value.name in self.graph.initializers and not value.is_graph_output():
                del self.graph.initializers[name_of(value)]
                self.constants = {key: one for key, one in self.constants.items() if one is not value}


def _directions(node: ir.Node, inputs: int, outputs: int) -> Iterator[Sequence[int]]:
    """The axes and directions of a Scan's inputs, and of its outputs."""
    sides = (("input", inputs), ("output", outputs))
    return (
        node.attributes.get_ints(f"scan_{side}_{kind}") or [0] * number
        for side, number in sides
        for kind in ("axes", "directions")
    )


def _handed_on(node: ir.Node) -> ir.Value | None:
    """The weight that a node of a turn passes on unchanged, as a state that all turns share; None for other nodes."""
    marked = {STOPS_GRADIENT, OWN_BACKWARD, GRADIENT_FORM} & node.metadata_props.keys()
    value = node.inputs[0] if node.op_type == "Identity" and not marked else None
    return value if value is not None and value.is_initializer() else None


def _element(tensor: ir.TensorProtocol, axis: int, k: int, name: str, *, keeps: bool = False) -> ir.TensorProtocol:
    """The element `k` of a stack along an axis; `keeps`: whether the axis stays. Of a large stack it is read only when it is written."""
    shape = tensor.shape.numpy()
    shape = (*shape[:axis], *([1] if keeps else []), *shape[axis + 1 :])

    def compute(box: Box) -> Array:
        if keeps:
            return shard_of(tensor, (*box[:axis], slice(k, k + 1), *box[axis + 1 :]))
        return shard_of(tensor, (*box[:axis], slice(k, k + 1), *box[axis:])).squeeze(axis)

    if is_absent(tensor):
        return AbsentTensor(tensor.dtype, shape, name)
    if tensor.nbytes > _EAGER:
        return ComputedTensor(compute, tensor.dtype, shape, name)
    return ir.Tensor(np.ascontiguousarray(compute(full_box(shape))), dtype=tensor.dtype, name=name)


def _extent(body: ir.Graph) -> int:
    """The number of nodes in a body."""
    return max(1, sum(1 for _ in nodes_of(body)))


def _size(value: ir.Value, axis: int) -> int | None:
    """The length of a value along an axis; None if it is not fixed."""
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


def _learn_shapes(model: ir.Model) -> None:
    """Infers the types and shapes of nodes' results from the inputs; shapes that the file declares are not trusted."""
    copy = model.clone()
    infer_shapes(copy, {})
    for node, other in zip(nodes_of(model.graph), nodes_of(copy.graph), strict=True):
        for value, shaped in zip(node.outputs, other.outputs, strict=True):
            value.type, value.shape = value.type or shaped.type, shaped.shape
        for body, inner in zip(bodies(node), bodies(other), strict=True):
            for value, shaped in zip(body.inputs, inner.inputs, strict=True):
                value.type, value.shape = value.type or shaped.type, shaped.shape
