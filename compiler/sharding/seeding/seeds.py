"""Writes the shardings that the plan and the model give: of nodes, of values that enter and leave modules, of parameters and inputs.

A sharding rule applies to regions: a node, or a module with all nodes inside. Its `in` shards the node's operands, or the module's
arguments; shardings inside are derived. Styles shard the parameters of a region's nodes: colwise the factor that the parameter brings to
the output, rowwise the factor that it sums over; along the axis `tp` if the mesh has names, else along all of the group. Pull shards the
looked-up rows, always along all of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import PurePath

import onnx_ir as ir
from partc.compiler.analysis.bindings import unknown_input
from partc.compiler.annotations.seed import seed_annotations
from partc.compiler.errors import Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding, Pinned, ValueOnGroup
from partc.compiler.ir.graph import ADAPTER, BY_EXPERT, CONTEXT, SERVED, name_of
from partc.compiler.ir.program import Placed
from partc.compiler.ir.sharded import Group
from partc.compiler.layout.layout import Layout, primes
from partc.compiler.plan.groups import DATA_AXIS, ranks_text, shown_mesh
from partc.compiler.plan.pattern import compile_pattern
from partc.compiler.plan.rules import DATA_PARALLEL, ShardingRule
from partc.compiler.plan.shard_spec import ShardSpec
from partc.compiler.sharding.seeding.region_layouts import is_text, layout_of_spec
from partc.compiler.sharding.seeding.regions import RegionMatch, RegionShardings, line_of
from partc.compiler.sharding.seeding.strategy import refined
from partc.compiler.sharding.seeding.styles import parameter_factor, styled

TENSOR_PARALLEL = "tp"


def seed(
    program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], rules: Mapping[ir.Node, ShardingRule]
) -> tuple[Pinned, list[Problem]]:
    """Writes the shardings of `rules`, the model and the dataset into `choices`, and closes choices that are given completely.

    Returns the `Pinned` layouts of inputs and outputs, and the problems.
    """
    work = _Seeds(program, choices, rules)
    work.annotations()
    work.dataset()
    work.experts()
    work.folded()
    for region in work.regions():
        work.region(region)
    work.styles_without_use()
    return work.pinned, work.problems


def _outermost(pattern: str, path: str) -> str:
    """Returns the outermost module on a path that a pattern matches, "" if it matches none."""
    matches, parts = compile_pattern(pattern).matches, path.split(".") if path else []
    return next((prefix for k in range(len(parts)) if matches(prefix := ".".join(parts[: k + 1]))), "")


class _Seeds:
    def __init__(
        self, program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], rules: Mapping[ir.Node, ShardingRule]
    ) -> None:
        self.program, self.choices, self.rules = program, choices, rules
        self.pinned = Pinned()
        self.problems: list[Problem] = []
        self.styled = set[int]()
        self.idle: list[tuple[RegionMatch, str, str]] = []
        self.cuts = RegionShardings(program, choices, self.pinned, self.problems)
        self.constants, self.instances, self.problem = self.cuts.constants, self.cuts.instances, self.cuts.problem

    def annotations(self) -> None:
        """Writes the shardings of the model's own annotations, for nodes that no rule matches."""
        if self.program.followed:
            self.problems += seed_annotations(self.program, self.choices, self.pinned, self.rules)

    def experts(self) -> None:
        """Shards the experts of the plan's `experts` along their axis; the borders follow their rows (`Propagation`)."""
        for instance, choice in self.choices.items():
            if BY_EXPERT not in instance.node.meta or not choice.rule.looked_up:
                continue
            axis, where = instance.node.meta[BY_EXPERT]
            named = refined(self.program.plan.axes_of(instance.group))[1]
            if axis not in named:
                fact = f"'{self.program.paths[instance.node]}' runs on {ranks_text(instance.group)}, which have no axis '{axis}'"
                self.problems.append(
                    Problem(where, fact, "experts are shared out along an axis of the ranks that run them")
                )
                return
            choice.axes[choice.rule.looked_up] = named[axis]
            choice.why[choice.rule.looked_up] = f"{PurePath(where).name} experts"

    def folded(self) -> None:
        """Shards the tokens of inputs where they are put into folded order, along the axis of the plan's `context`."""
        for instance, choice in self.choices.items():
            mark = instance.node.meta.get(CONTEXT)
            if mark is not None and mark.first:
                choice.axes[mark.factor] = refined(self.program.plan.axes_of(instance.group))[1].get(mark.axis, ())
                choice.why[mark.factor] = mark.why

    def regions(self) -> list[RegionMatch]:
        """Returns the regions in order; a node belongs to the last rule that matches it."""
        module = functools.cache(_outermost)
        found: dict[tuple[int, str], RegionMatch] = {}
        for node, rule in self.rules.items():
            path = self.program.paths[node]
            path = module(rule.pattern, path.rpartition(".")[0]) or path
            found.setdefault((id(rule), path), RegionMatch(path, rule)).nodes.append(node)
        return list(found.values())

    def region(self, region: RegionMatch) -> None:
        alone = [node for node in region.nodes if not any(self.instances([node])) and node not in self.constants]
        if region.rule.outputs is not None:
            alone = alone or region.nodes
        placed = next((placed for node in alone if (placed := self.program.placement[node]).groups), None)
        if placed is not None and not any(self.instances(region.nodes)):
            self.problem(
                region,
                f"runs on {ranks_text(placed.groups[0])} alone ({placed.rule})",
                "a cut needs a group of several ranks",
                "place it on a list of ranks, or take the line out",
            )
            return
        match region.rule.style:
            case "replicate":
                for instance in self.instances(region.nodes):
                    self.choices[instance].open = False
            case "colwise" | "rowwise":
                self._style(region, region.rule.style)
            case "pull":
                self._pull(region)
        if region.rule.gathers:
            self._gather(region)
        self.cuts.cut(region)

    def _style(self, region: RegionMatch, style: str) -> None:
        done = False
        for instance in self.instances(region.nodes):
            if instance.node in self.constants:
                continue  # what makes a parameter is cut as its reader is
            if str(instance.node.meta.get(ADAPTER, "")).startswith(region.path):
                continue  # a style of a module speaks of its own weight
            meant = NodeOnGroup(styled(instance.node), instance.group)
            instance = meant if meant in self.choices else instance
            choice = self.choices[instance]
            found = parameter_factor(choice.rule, instance.node, style, self.cuts.is_constant)
            if found is None:
                continue
            letter = found[1]
            axes = self._style_axes(region, instance.group)
            if axes is None:
                return
            if BY_EXPERT in instance.node.meta and {*axes} & {*choice.axes[choice.rule.looked_up]}:
                fact = f"{style}, but the experts of '{self.program.paths[instance.node]}' are shared out along the same axis"
                self.problem(region, fact, "an axis shards one dim of a weight", "take one of the two lines out")
                return
            done = True
            choice.axes[letter] = axes
            choice.why[letter] = f"{line_of(region.rule)} {style}"
        what = "brings a dim to the output" if style == "colwise" else "sums over a dim"
        fact = f"{style}, but no parameter inside {what}"
        self._uses(region, done, fact, "name the linear, convolution or embedding itself")

    def _pull(self, region: RegionMatch) -> None:
        """Shards the rows that a region's nodes look up over all ranks of their groups; a table of integers is index arithmetic."""
        lookups = [one for one in self.instances(region.nodes) if self.choices[one].rule.looked_up]
        kinds = {one: one.node.outputs[0].dtype for one in lookups}
        instances = [one for one, kind in kinds.items() if kind is None or kind.is_floating_point()]
        for instance in instances:
            choice = self.choices[instance]
            choice.pulls = True
            choice.axes[choice.rule.looked_up] = tuple(range(len(choice.mesh)))
            choice.why[choice.rule.looked_up] = f"{line_of(region.rule)} pull"
        fact, help = (
            "nothing inside looks up rows of a table by ids",
            "name the embedding, or the Gather along axis 0, itself",
        )
        if any(SERVED in node.meta for node in region.nodes):
            fact, help = (
                "its rows are pulled from the ranks that serve them",
                "take this line out, or the role in 'placement'",
            )
        self._uses(region, bool(instances), f"pull, but {fact}", help)

    def _uses(self, region: RegionMatch, used: bool, fact: str, help: str) -> None:
        """Notes whether a style applies to a region, and the problem to report if it applies to none of its pattern's regions."""
        if used:
            self.styled.add(id(region.rule))
        else:
            self.idle.append((region, fact, help))

    def styles_without_use(self) -> None:
        """Adds the problems of styles that apply to nothing: `layers.*: colwise` may also match an activation, but not only activations."""
        for region, fact, help in self.idle:
            if id(region.rule) not in self.styled:
                self.problem(region, fact, help=help)

    def _gather(self, region: RegionMatch) -> None:
        """Pins the outputs of a region as replicated on its group."""
        inside = set(region.nodes)
        for instance in self.instances(region.nodes):
            for k, out in enumerate(instance.node.outputs):
                leaves = out.is_graph_output() or any(use.node not in inside for use in out.uses())
                if leaves and out.shape is not None and instance.node not in self.constants:
                    whole = Layout.replicated(self.choices[instance].mesh, len(out.shape))
                    self.pinned.outputs[instance, k] = (whole, region.rule.where)

    def _style_axes(self, region: RegionMatch, group: Group) -> tuple[int, ...] | None:
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

    def dataset(self) -> None:
        """Pins the layouts in which inputs arrive on every group that reads them."""
        plan = self.program.plan
        for value in self.program.model.graph.inputs:
            dataset_spec = plan.dataset.specs.get(name_of(value))
            if plan.dataset.style != DATA_PARALLEL and dataset_spec is None:
                continue
            wrong: list[Problem] = []
            fits = False
            for group in dict.fromkeys(i.group for i in self.choices if value in self.program.reads[i.node]):
                if len(group) == 1 or value.shape is None or not len(value.shape):
                    continue
                if is_text(value):
                    if dataset_spec is not None:
                        fact = f"dataset of '{value.name}': it is of strings, which no collective takes"
                        self.problems.append(
                            Problem(dataset_spec.where, fact, help="take the line out: it arrives whole")
                        )
                    continue
                cut = dataset_spec.spec if dataset_spec else self._batch_sharding(value, group)
                where = dataset_spec.where if dataset_spec else plan.dataset.where
                try:
                    self.pinned.arriving[ValueOnGroup(value, group)] = (
                        layout_of_spec(self.program, cut, value, group),
                        where,
                    )
                    fits = True
                except ValueError as error:
                    wrong.append(Problem(where, f"dataset of '{value.name}': {error}"))
            if not fits:  # else a group that cannot have it so is sent what it needs
                self.problems += wrong
        for name, entry in plan.dataset.specs.items():
            if name not in map(name_of, self.program.model.graph.inputs):
                self.problems.append(unknown_input(name, entry.where, self.program.model.graph, plan))

    def _batch_sharding(self, value: ir.Value, group: Group) -> ShardSpec:
        assert value.shape is not None
        axes = self.program.plan.axes_of(group)
        first: int | tuple[str, ...] = len(group)
        rest: int | tuple[str, ...] = 1
        if axes:
            context = self.program.plan.context  # whose axis shards tokens, and no records
            names = [name for name, _ in axes if context is None or name != context.axis]
            first, rest = ((DATA_AXIS,) if DATA_AXIS in names else tuple(names)), ()
        along = self.program.batch_dims.get(value, 0)
        return tuple(first if dim == along else rest for dim in range(len(value.shape)))
