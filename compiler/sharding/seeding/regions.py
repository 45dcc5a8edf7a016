"""The shardings that `in`, `out` and `parameters` of a rule give a region: a node, a function's call, or a module with all its nodes.

A region of one node means that node: its cuts are the op's own strategy, and a strategy that the op cannot have is an error. For a region
of several nodes the cuts are those of the values that enter and leave it, laid out together (`region_layouts.py`); the shardings inside are
derived from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import NamedTuple

import onnx_ir as ir
from partc.compiler.errors import Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned, ValueOnGroup
from partc.compiler.ir.graph import WRITTEN, operand_name
from partc.compiler.ir.program import Placed
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout, Mesh, primes
from partc.compiler.plan.rules import ShardingRule
from partc.compiler.plan.shard_spec import ShardSpec, is_named
from partc.compiler.sharding.seeding.region_layouts import Joint, corresponding, layout_of_spec, names_of, numbers_of
from partc.compiler.sharding.seeding.strategy import WrongStrategy, assign_integers, from_names, refined, shared_axes
from partc.runtime.artifact import format as fmt
from partc.runtime.spellings import nearest


@dataclass
class RegionMatch:
    """One match of a rule: the path of a module or node, and its nodes."""

    path: str
    rule: ShardingRule
    nodes: list[ir.Node] = field(default_factory=list)


@dataclass
class RegionCall:
    """One call of a region: its nodes, its arguments and results, and the sharding of each."""

    nodes: list[ir.Node]
    arguments: list[ir.Value | None]
    results: list[ir.Value | None]


class _ModelOperands(NamedTuple):
    """A node's inputs and outputs in the model; None for an operand that is absent or that the training has removed."""

    inputs: list[ir.Value | None]
    outputs: list[ir.Value | None]


def _present(values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    return [value for value in values if value is not None]


def group_mesh(program: Placed, group: Group) -> Mesh:
    """The axes of a group: those of the plan's mesh within it, in prime factors; without such axes, the prime factors of its size."""
    axes = program.plan.axes_of(group)
    return refined(axes)[0] if axes else primes(len(group))


def line_of(rule: ShardingRule) -> str:
    """A rule's line with the file's name but not its folder, which differs by machine."""
    return PurePath(rule.where).name


class RegionShardings:
    """Writes the shardings that rules give to regions into `choices` and `pinned`, and appends every violation to `problems`."""

    def __init__(
        self, program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], given: Pinned, problems: list[Problem]
    ) -> None:
        self.program, self.choices, self.pinned, self.problems = program, choices, given, problems
        self.follows = {node for node, placed in program.placement.items() if placed.follows}
        self.constants = {node for node, placed in program.placement.items() if placed.rule == fmt.CONSTANT}

    def instances(self, nodes: Sequence[ir.Node]) -> Iterator[NodeOnGroup]:
        """Yields the nodes on each of their groups with several ranks."""
        for node in nodes:
            for group in self.program.placement[node].groups:
                if len(group) > 1:
                    yield NodeOnGroup(node, group)

    def is_constant(self, value: ir.Value) -> bool:
        """Whether a value is a parameter, or computed from parameters alone."""
        producer = value.producer()
        return value.is_initializer() or (producer is not None and producer in self.constants)

    def problem(self, region: RegionMatch, fact: str, law: str = "", help: str = "") -> None:
        """Appends a problem of a region's rule, at the rule's line."""
        self.problems.append(Problem(region.rule.where, f"sharding of '{region.path}': {fact}", law, help))

    def cut(self, region: RegionMatch) -> None:
        """Applies the region's rule: the shards of its inputs, its parameters and its outputs."""
        rule = region.rule
        parameters = self._parameters(region)
        if rule.inputs is None and rule.outputs is None and not parameters:
            return
        for call in self._calls(region):
            entering = self._paired(region, rule.inputs, call.arguments, "enter", "in which they are first read")
            leaving = self._paired(region, rule.outputs, call.results, "leave", "in which they are made")
            if entering is None or leaving is None:
                continue
            node = self._one_node(region, call)
            alone = node is not None and self._as_operands(region, node, call)
            for group in dict.fromkeys(instance.group for instance in self.instances(call.nodes)):
                instances = [instance for instance in self.instances(call.nodes) if instance.group == group]
                joint = Joint(instances, self.choices, group)
                for value, cut in (*entering, *parameters, *leaving):
                    joint.add(value, cut)
                weights = [(value, cut) for value, cut in entering if value.is_initializer()]
                if not alone:
                    self._entering(region, instances, joint, [one for one in entering if one not in weights])
                    self.pinned.arriving |= self._layouts(region, group, joint, weights)
                self.pinned.stored |= self._layouts(region, group, joint, parameters)
                self._leaving(region, instances, joint, leaving)

    def _calls(self, region: RegionMatch) -> Iterator[RegionCall]:
        rule = region.rule
        if not rule.calls:
            yield RegionCall(region.nodes, list(self._enter(region)), list(self._leave(region)))
        for call in rule.calls:
            arguments = [self.values.get(name) for name in call.arguments]
            results = [self.values.get(name) for name in call.results]
            yield RegionCall(self._between(arguments, results, region.nodes), arguments, results)

    def _between(
        self, arguments: Sequence[ir.Value | None], results: Sequence[ir.Value | None], inside: Sequence[ir.Node]
    ) -> list[ir.Node]:
        """Returns the nodes of a region on the paths from a call's arguments to its results, in graph order."""
        allowed, entering = set(inside), set(arguments)
        reached: set[ir.Node] = set()
        waiting = [value for value in results if value is not None]
        while waiting:
            value = waiting.pop()
            producer = value.producer()
            if value in entering or producer is None or producer in reached or producer not in allowed:
                continue
            reached.add(producer)
            waiting += self.program.reads[producer]
        return [node for node in inside if node in reached]

    def _one_node(self, region: RegionMatch, call: RegionCall | None) -> ir.Node | None:
        """The node that a region or a call of it means: its only node, or that of the region's path if training added some; else None."""
        own = [node for node in region.nodes if self.program.paths[node] == region.path]
        if own and WRITTEN in own[0].meta:
            return None  # it is but the last of several that stand for the op
        nodes = own or [node for node in (call.nodes if call else region.nodes) if node not in self.follows]
        return nodes[0] if len(nodes) == 1 else None

    def _enter(self, region: RegionMatch) -> Sequence[ir.Value | None]:
        """Returns the inputs of a region of the plan: an op's own tensors if the rule lists as many, else the values that are computed
        outside.

        Inputs that the training adds, such as the step number, are left out: the plan's author does not know of them."""
        inside, training = set(region.nodes), self.program.training
        added = {value for value in self.program.model.graph.inputs if training and value.name in training.scalars}
        node, count = self._one_node(region, None), len(region.rule.inputs or ())
        own = [] if node is None else [value for value in node.inputs if value not in added]
        written = self._operands_in_model(region)
        operands = (own, _present(own), written.inputs, _present(written.inputs))
        if (given := next((each for each in operands if each and len(each) == count), None)) is not None:
            return given
        return list(
            dict.fromkeys(
                value
                for node in region.nodes
                for value in self.program.reads[node]
                if value.producer() not in inside and value not in added and not self.is_constant(value)
            )
        )

    def _leave(self, region: RegionMatch) -> Sequence[ir.Value | None]:
        """Returns the outputs of a region of the plan: an op's own tensors if the rule lists as many, else those that are read outside."""
        inside = set(region.nodes)
        node, count = self._one_node(region, None), len(region.rule.outputs or ())
        own = [] if node is None else list(node.outputs)
        if (
            given := next(
                (one for one in (own, self._operands_in_model(region).outputs) if one and len(one) == count), None
            )
        ) is not None:
            return given
        return [
            out
            for node in region.nodes
            if node not in self.constants
            for out in node.outputs
            if any(use.node not in inside for use in out.uses()) or out.is_graph_output()
        ]

    def _operands_in_model(self, region: RegionMatch) -> _ModelOperands:
        """The operands and results that the region's node had in the model before a rewrite or the training changed it; else none."""
        training = self.program.training
        in_model = training.untrained.operands.get(region.path) if training is not None else None
        in_model = next(
            (
                node.meta[WRITTEN]
                for node in region.nodes
                if WRITTEN in node.meta and self.program.paths[node] == region.path
            ),
            in_model,
        )
        return _ModelOperands(*([self.values.get(name) for name in names] for names in in_model or ((), ())))

    def _paired(
        self,
        region: RegionMatch,
        cuts: Sequence[ShardSpec | None] | None,
        values: Sequence[ir.Value | None],
        verb: str,
        order: str,
    ) -> list[tuple[ir.Value, ShardSpec]] | None:
        """Pairs values with their shardings, but for those to be derived; None, and a problem, where the numbers of the two differ."""
        if cuts is None:
            return []
        side = "input" if verb == "enter" else "output"
        if len(cuts) != len(values):
            names = ", ".join(f"'{value.name}'" for value in values if value is not None)
            self.problem(
                region,
                f"the strategy has {len(cuts)} {side}s, but {len(values)} {verb}: {names}",
                f"a strategy has one entry for each tensor that {verb}s, in the order {order}",
                "write null for one whose cut is to be derived",
            )
            return None
        absent = [k for k, (value, cut) in enumerate(zip(values, cuts, strict=True)) if value is None and cut]
        if absent and side == "input" and not region.rule.calls:
            for k in absent:
                self.problem(region, f"input {k} is cut, but is absent or no tensor", help="write null")
            return None
        return [(value, cut) for value, cut in zip(values, cuts, strict=True) if cut is not None and value is not None]

    @cached_property
    def values(self) -> dict[str, ir.Value]:
        """Maps each name to its value in the main graph."""
        graph = self.program.model.graph
        made = (out for node in graph for out in node.outputs)
        return {operand_name(value): value for value in (*made, *graph.initializers.values(), *graph.inputs)}

    def _as_operands(self, region: RegionMatch, node: ir.Node, call: RegionCall) -> bool:
        """Shards the single node of a region by its op's strategy; False if the rule's entries are not the node's own operands."""
        at = corresponding(node.inputs, call.arguments)
        if any(k is None and argument is not None for k, argument in zip(at, call.arguments, strict=True)):
            return False
        cuts: list[ShardSpec | None] = [None] * len(node.inputs)  # an absent input's stays
        for k, cut in zip(at, region.rule.inputs or (), strict=False):
            if k is not None:
                cuts[k] = cut
        if any(cut is not None for cut in cuts):
            for instance in self.instances([node]):
                self._operands(region, instance, cuts)
        return True

    def _operands(self, region: RegionMatch, instance: NodeOnGroup, cuts: Sequence[ShardSpec | None]) -> None:
        choice = self.choices[instance]
        try:
            if any(cut is not None and is_named(cut) for cut in cuts):
                axes = self.program.plan.axes_of(instance.group)
                by_factor = from_names(choice.rule, [None if c is None else names_of(c) for c in cuts], axes)
                choice.mesh = group_mesh(self.program, instance.group)
            else:
                numbers = [None if c is None else numbers_of(c) for c in cuts]
                shards = assign_integers(choice.rule, numbers, len(instance.group))
                choice.mesh, by_factor = shared_axes(choice.rule, shards, len(instance.group))
        except WrongStrategy as error:
            subject = f"sharding of '{region.path}' ({instance.node.op_type})"
            self.problems += error.problems(region.rule.where, subject)
            return
        choice.axes.update(by_factor)
        choice.why.update(dict.fromkeys(by_factor, line_of(region.rule)))
        choice.open = any(
            cut is None and letters is not None for cut, letters in zip(cuts, choice.rule.inputs, strict=False)
        )

    def _entering(
        self,
        region: RegionMatch,
        instances: Sequence[NodeOnGroup],
        joint: Joint,
        entering: Sequence[tuple[ir.Value, ShardSpec]],
    ) -> None:
        for value, cut in entering:
            readers = [(one, k) for one in instances for k, operand in enumerate(one.node.inputs) if operand is value]
            if readers and (layout := self._layout(region, joint, cut, value, readers[0][0].group)):
                for reader in readers:
                    self.pinned.inputs[reader] = (layout, line_of(region.rule))

    def _layouts(
        self, region: RegionMatch, group: Group, joint: Joint, weights: Sequence[tuple[ir.Value, ShardSpec]]
    ) -> dict[ValueOnGroup, tuple[Layout, str]]:
        return {
            ValueOnGroup(value, group): (layout, region.rule.where)
            for value, cut in weights
            if (layout := self._layout(region, joint, cut, value, group))
        }

    def _leaving(
        self,
        region: RegionMatch,
        instances: Sequence[NodeOnGroup],
        joint: Joint,
        leaving: Sequence[tuple[ir.Value, ShardSpec]],
    ) -> None:
        for value, cut in leaving:
            for instance in instances:
                if value.producer() is instance.node and (
                    layout := self._output_layout(region, instance, joint, cut, value)
                ):
                    key = instance, list(instance.node.outputs).index(value)
                    self.pinned.outputs[key] = (layout, region.rule.where)

    def _output_layout(
        self, region: RegionMatch, instance: NodeOnGroup, joint: Joint, cut: ShardSpec, value: ir.Value
    ) -> Layout | None:
        """The layout of a region's output: the op's own output layout if that has the declared shards, else the joint layout."""
        choice = self.choices[instance]
        made = choice.output(list(instance.node.outputs).index(value))
        if made is not None and choice.axes and not is_named(cut):
            lies = [*made.shards]
            if lies == numbers_of(cut):
                return Layout(made.mesh, made.cuts)
        return self._layout(region, joint, cut, value, instance.group)

    def _parameters(self, region: RegionMatch) -> list[tuple[ir.Value, ShardSpec]]:
        weights = self.program.model.graph.initializers
        specs: list[tuple[ir.Value, ShardSpec]] = []
        for name, cut in region.rule.parameters.items():
            value = next((weights[n] for n in (f"{region.path}.{name}", name) if n in weights), None)
            if value is not None:
                specs.append((value, cut))
                continue
            below = [n.removeprefix(f"{region.path}.") for n in weights if n.startswith(f"{region.path}.")]
            near = ", ".join(nearest(name, below or list(weights)))
            self.problem(region, f"no parameter '{name}'", help=f"the nearest names are {near}")
        return specs

    def _layout(
        self, region: RegionMatch, joint: Joint, cut: ShardSpec, value: ir.Value, group: Group
    ) -> Layout | None:
        try:
            return joint.layout(value, cut) or layout_of_spec(self.program, cut, value, group)
        except ValueError as error:
            self.problem(region, f"'{value.name}': {error}")
            return None
