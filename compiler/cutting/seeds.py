"""What the plan and the model give: cuts of nodes, of what enters and leaves modules, of parameters and inputs.

A sharding rule speaks of regions: a node, or a module with all that is inside. Its `in` are cuts of the node's operands, or of what the
module is given; what is inside is derived. Styles cut the parameters of a region's nodes: colwise the factor that the
parameter brings to the output, rowwise the factor that it sums over; along the axis `tp` where the mesh has names, else along
all of the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.annotations.seed import seed_annotations
from partc.compiler.cutting.choice import Choice, Instance
from partc.compiler.cutting.propagate import Given
from partc.compiler.cutting.strategy import WrongStrategy, assign_integers, from_names, refined, to_axes
from partc.compiler.errors import Problem
from partc.compiler.layouts.layout import Layout, Mesh, primes
from partc.compiler.placing.pattern_rules import sharding_rules
from partc.compiler.placing.settle import spelled
from partc.compiler.plan.cut import Cut, is_named
from partc.compiler.plan.groups import Axes, shown_mesh
from partc.compiler.plan.pattern import compile_pattern, nearest
from partc.compiler.plan.rules import DATA_PARALLEL, ShardingRule
from partc.compiler.program import Group, Program

TENSOR_PARALLEL, DATA_AXIS = "tp", "dp"


@dataclass
class Region:
    """What one rule matched in one place: the path of the module or node, and the nodes inside."""

    path: str
    rule: ShardingRule
    nodes: list[ir.Node] = field(default_factory=list)


def group_mesh(program: Program, group: Group) -> Mesh:
    """The axes of a group: those that the plan's mesh has within it, in prime factors; else the prime factors of its size."""
    axes = program.plan.axes_of(group)
    return refined(axes)[0] if axes else primes(len(group))


def seed(program: Program, choices: Mapping[Instance, Choice]) -> tuple[Given, list[Problem]]:
    """Fills in the choices that are given and closes those that are given whole; layouts of operands go into `Given`."""
    work = _Seeds(program, choices)
    work.annotations()
    work.dataset()
    for region in work.regions():
        work.region(region)
    return work.given, work.problems


class _Seeds:
    def __init__(self, program: Program, choices: Mapping[Instance, Choice]) -> None:
        self.program, self.choices = program, choices
        self.given = Given()
        self.problems: list[Problem] = []
        self.constants = {node for node, placed in program.placement.items() if placed.rule == "constant"}

    def instances(self, nodes: Sequence[ir.Node]) -> Iterator[Instance]:
        """The nodes on their groups of several ranks."""
        for node in nodes:
            for group in self.program.placement[node].groups:
                if len(group) > 1:
                    yield Instance(node, group)

    def annotations(self) -> None:
        """What the model's own annotations cut, where no rule speaks of the node."""
        if self.program.followed:
            decided, _ = sharding_rules(self.program)
            self.problems += seed_annotations(self.program, self.choices, self.given, decided)

    def regions(self) -> list[Region]:
        """The regions in order; a node belongs to the last rule that matches it."""
        rules, _ = sharding_rules(self.program)
        found: dict[tuple[int, str], Region] = {}
        for node, rule in rules.items():
            matches = compile_pattern(rule.pattern).matches
            parts = self.program.paths[node].split(".")
            prefixes = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            path = next((prefix for prefix in prefixes if matches(prefix)), self.program.paths[node])
            found.setdefault((id(rule), path), Region(path, rule)).nodes.append(node)
        return list(found.values())

    def problem(self, region: Region, fact: str, law: str = "", help: str = "") -> None:
        self.problems.append(Problem(region.rule.where, f"sharding of '{region.path}': {fact}", law, help))

    def region(self, region: Region) -> None:
        alone = [node for node in region.nodes if not any(self.instances([node])) and node not in self.constants]
        if alone and not any(self.instances(region.nodes)):
            placed = self.program.placement[alone[0]]
            self.problem(
                region,
                f"runs on {spelled(placed.groups[0])} alone ({placed.rule})",
                "a cut needs a group of several ranks",
                "place it on a list of ranks, or take the line out",
            )
            return
        group = next((instance.group for instance in self.instances(region.nodes)), ())
        match region.rule.style:
            case "replicate":
                for instance in self.instances(region.nodes):
                    self.choices[instance].open = False
            case "colwise" | "rowwise":
                self._style(region, region.rule.style)
        if region.rule.inputs is not None:
            self._inputs(region)
        if region.rule.outputs is not None:
            self._outputs(region, group)
        self._parameters(region)

    def _style(self, region: Region, style: str) -> None:
        done = False
        for instance in self.instances(region.nodes):
            if instance.node in self.constants:
                continue  # what makes a parameter is cut as its reader is
            choice = self.choices[instance]
            letter = self._parameter_factor(instance, choice, style)
            if letter is None:
                continue
            axes = self._style_axes(region, instance.group)
            if axes is None:
                return
            done = True
            choice.axes[letter] = axes
            choice.why[letter] = f"{_line(region.rule)} {style}"
        if not done:
            what = "brings a dim to the output" if style == "colwise" else "sums over a dim"
            self.problem(
                region,
                f"{style}, but no parameter inside {what}",
                help="name the linear, convolution or embedding itself",
            )

    def _parameter_factor(self, instance: Instance, choice: Choice, style: str) -> str | None:
        rule, node = choice.rule, instance.node
        for k, value in enumerate(node.inputs):
            letters = rule.inputs[k] if k < len(rule.inputs) else None
            if value is None or not letters or len(letters) < 2 or not self._is_constant(value):
                continue
            others = {
                letter
                for other, operand in enumerate(node.inputs)
                if other != k and operand is not None and not self._is_constant(operand)
                for letter in (rule.inputs[other] or "")
            }
            made = rule.outputs[0] or ""
            if style == "colwise":
                fitting = [letter for letter in letters if letter in made and letter not in others]
            else:
                fitting = [letter for letter in letters if letter not in made and rule.reduce.get(letter)]
            fitting = [letter for letter in fitting if letter in rule.factors]
            if fitting:
                return fitting[-1] if style == "colwise" else fitting[0]
        return None

    def _is_constant(self, value: ir.Value) -> bool:
        producer = value.producer()
        return value.is_initializer() or (producer is not None and producer in self.constants)

    def _style_axes(self, region: Region, group: Group) -> tuple[int, ...] | None:
        axes = self.program.plan.axes_of(group)
        if not axes:
            return tuple(range(len(primes(len(group)))))
        named = refined(axes)[1]
        if TENSOR_PARALLEL not in named:
            self.problem(
                region,
                f"the mesh {shown_mesh(axes)} has no axis '{TENSOR_PARALLEL}'",
                "styles cut along it",
                "name an axis so, or give `in`",
            )
            return None
        return named[TENSOR_PARALLEL]

    def _inputs(self, region: Region) -> None:
        cuts = region.rule.inputs or ()
        if region.rule.calls:
            for call in region.rule.calls:
                self._entering(region, cuts, [self._named(name) for name in call.arguments])
        elif node := self._node_of(region, len(cuts)):
            for instance in self.instances([node]):
                self._operands(region, instance, cuts)
        else:
            inside = set(region.nodes)
            values = dict.fromkeys(
                value
                for node in region.nodes
                for value in self.program.reads[node]
                if value.producer() not in inside and not self._is_constant(value)
            )
            if len(cuts) != len(values):
                names = ", ".join(f"'{value.name}'" for value in values)
                self.problem(
                    region,
                    f"the strategy has {len(cuts)} inputs, but {len(values)} enter: {names}",
                    "a strategy has one entry for each tensor that enters, in the order in which they are first read",
                    "write null for one whose cut is to be derived",
                )
                return
            self._entering(region, cuts, list(values))

    def _node_of(self, region: Region, cuts: int) -> ir.Node | None:
        """The one node of a region, or the one that has its path where training gave it further parts, if the cuts are its operands'."""
        own = [node for node in region.nodes if self.program.paths[node] == region.path]
        nodes = region.nodes if len(region.nodes) == 1 else own
        return nodes[0] if len(nodes) == 1 and cuts == sum(v is not None for v in nodes[0].inputs) else None

    def _named(self, name: str) -> ir.Value | None:
        graph = self.program.model.graph
        for value in (*graph.inputs, *graph.initializers.values()):
            if value.name == name:
                return value
        return next((out for node in graph for out in node.outputs if out.name == name), None)

    def _operands(self, region: Region, instance: Instance, cuts: Sequence[Cut | None]) -> None:
        choice = self.choices[instance]
        try:
            if any(cut is not None and is_named(cut) for cut in cuts):
                axes = self.program.plan.axes_of(instance.group)
                named = from_names(choice.rule, [None if c is None else _names(c) for c in cuts], axes)
                choice.mesh, given = group_mesh(self.program, instance.group), named
            else:
                numbers = [None if c is None else [p if isinstance(p, int) else 1 for p in c] for c in cuts]
                pieces = assign_integers(choice.rule, numbers, len(instance.group))
                choice.mesh, given = to_axes(pieces, choice.rule.factors, len(instance.group))
        except WrongStrategy as error:
            subject = f"sharding of '{region.path}' ({instance.node.op_type})"
            self.problems += error.problems(region.rule.where, subject)
            return
        choice.axes.update(given)
        choice.why.update(dict.fromkeys(given, _line(region.rule)))
        choice.open = any(cut is None for cut in cuts)

    def _entering(self, region: Region, cuts: Sequence[Cut | None], values: Sequence[ir.Value | None]) -> None:
        for cut, value in zip(cuts, values, strict=False):
            if cut is None or value is None:
                continue
            for instance in self.instances(region.nodes):
                for k, operand in enumerate(instance.node.inputs):
                    if operand is value:
                        layout = self._layout(region, cut, value, instance.group)
                        if layout is not None:
                            self.given.inputs[instance, k] = (layout, _line(region.rule))

    def _outputs(self, region: Region, group: Group) -> None:
        inside = set(region.nodes)
        if region.rule.calls:
            values = [self._named(name) for call in region.rule.calls[:1] for name in call.results]
        else:
            values = [
                out
                for node in region.nodes
                for out in node.outputs
                if any(use.node not in inside for use in out.uses()) or out.is_graph_output()
            ]
        for cut, value in zip(region.rule.outputs or (), values, strict=False):
            producer = value.producer() if value is not None else None
            if cut is None or value is None or producer is None:
                continue
            layout = self._layout(region, cut, value, group)
            if layout is not None:
                self.given.outputs[Instance(producer, group), producer.outputs.index(value)] = (
                    layout,
                    region.rule.where,
                )

    def _parameters(self, region: Region) -> None:
        weights = self.program.model.graph.initializers
        for name, cut in region.rule.parameters.items():
            found = next((weights[n] for n in (f"{region.path}.{name}", name) if n in weights), None)
            if found is None:
                below = [n.removeprefix(f"{region.path}.") for n in weights if n.startswith(f"{region.path}.")] or list(
                    weights
                )
                self.problem(
                    region, f"no parameter '{name}'", help=f"the nearest names are {', '.join(nearest(name, below))}"
                )
                continue
            for group in dict.fromkeys(i.group for i in self.instances(region.nodes)):
                layout = self._layout(region, cut, found, group)
                if layout is not None:
                    self.given.arriving[found, group] = (layout, region.rule.where)

    def _layout(self, region: Region, cut: Cut, value: ir.Value, group: Group) -> Layout | None:
        try:
            return cut_layout(self.program, cut, value, group)
        except ValueError as error:
            self.problem(region, f"'{value.name}': {error}")
            return None

    def dataset(self) -> None:
        """How inputs arrive on every group that reads them."""
        plan = self.program.plan
        for value in self.program.model.graph.inputs:
            given = plan.dataset.cuts.get(value.name or "")
            if plan.dataset.style != DATA_PARALLEL and given is None:
                continue
            wrong: list[Problem] = []
            fits = False
            for group in dict.fromkeys(i.group for i in self.choices if value in self.program.reads[i.node]):
                if len(group) == 1 or value.shape is None or not len(value.shape):
                    continue
                cut = given.cut if given else self._batch_cut(value, group)
                where = given.where if given else plan.dataset.where
                try:
                    self.given.arriving[value, group] = (cut_layout(self.program, cut, value, group), where)
                    fits = True
                except ValueError as error:
                    wrong.append(Problem(where, f"dataset of '{value.name}': {error}"))
            if not fits:  # else a group that cannot have it so is sent what it needs
                self.problems += wrong
        for name, entry in plan.dataset.cuts.items():
            names = [value.name or "" for value in self.program.model.graph.inputs]
            if name not in names:
                self.problems.append(
                    Problem(entry.where, f"the model has no input '{name}'", help=f"its inputs are {', '.join(names)}")
                )

    def _batch_cut(self, value: ir.Value, group: Group) -> Cut:
        assert value.shape is not None
        axes = self.program.plan.axes_of(group)
        first: int | tuple[str, ...] = len(group)
        rest: int | tuple[str, ...] = 1
        if axes:
            names = [name for name, _ in axes]
            first, rest = ((DATA_AXIS,) if DATA_AXIS in names else tuple(names)), ()
        return (first, *([rest] * (len(value.shape) - 1)))


def cut_layout(program: Program, cut: Cut, value: ir.Value, group: Group) -> Layout:
    """The layout that a cut gives a value on a group; ValueError where it has another number of dims or does not fit the group."""
    rank = len(value.shape) if value.shape is not None else len(cut)
    if len(cut) != rank:
        raise ValueError(f"the cut has {len(cut)} dims, the value has {rank}")
    axes: Axes = program.plan.axes_of(group)
    if is_named(cut):
        mesh, named = refined(axes)
        missing = [name for names in _names(cut) for name in names if name not in named]
        if missing:
            raise ValueError(f"'{missing[0]}' is no axis of the group's mesh")
        return Layout(mesh, tuple(tuple(axis for name in names for axis in named[name]) for names in _names(cut)))
    numbers = [piece if isinstance(piece, int) else 1 for piece in cut]
    product = math.prod(numbers)
    if len(group) % product:
        raise ValueError(f"the cut has {product} pieces, but the group has {len(group)} ranks")
    letters = [chr(ord("a") + dim) for dim in range(rank)]
    mesh, by_dim = to_axes(dict(zip(letters, numbers, strict=True)), letters, len(group))
    return Layout(mesh, tuple(by_dim[letter] for letter in letters))


def _line(rule: ShardingRule) -> str:
    """A rule's line without the folder, which differs by machine."""
    return PurePath(rule.where).name


def _names(cut: Cut) -> list[tuple[str, ...]]:
    return [piece if isinstance(piece, tuple) else () for piece in cut]
