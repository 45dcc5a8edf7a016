"""The stages of a placed program: each group is a stage, if no path of the data returns to a group that it left.

    placement   0    0    1    2        two towers: d reads of a and of b, and b of x alone
    node        a -> c -> d -> e
                     b ---^
    placement        1
    stage       0    0    1    2

Else a node's stage is the most changes of group on a way to it, and its group.

    placement   0    0    1    1    0        a loop: rank 0 is named again
    node        a -> b -> c -> d -> e
    stage       0    0    1    1    2

What reads inputs alone, such as the weights of labels, stands with its first reader where these are all on its group.

Named again in the opposite order, the last group has one stage; a schedule of a V takes it in two (`in_halves`).

Where the plan names stages, these are the stages (`placement/node_stages.py`).

What runs wherever its readers want it (constants, shape arithmetic) belongs to no stage of its own: it goes with what it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import onnx_ir as ir
from partc.compiler.ir.program import Lowered
from partc.compiler.ir.sharded import Group


@dataclass(frozen=True)
class NodeStages:
    """`groups[s]` runs stage s; `of` gives the stage of a node on a group, of those that have one."""

    groups: tuple[Group, ...]
    of: dict[tuple[ir.Node, Group], int]

    @cached_property
    def _by_node(self) -> dict[ir.Node, dict[Group, int]]:
        found: dict[ir.Node, dict[Group, int]] = {}
        for (node, group), stage in self.of.items():
            found.setdefault(node, {})[group] = stage
        return found

    def on(self, node: ir.Node, rank: int) -> int | None:
        """The stage in which a rank runs a node; None where it runs it in none, or wherever its readers are."""
        return min((stage for group, stage in self._by_node.get(node, {}).items() if rank in group), default=None)


def node_stages(program: Lowered) -> NodeStages:
    """The stage of every placed node. Stages are numbered by their depth, those of one depth in the order of the graph."""
    if program.stages and program.plan.pipeline is not None:
        groups = tuple(stage.ranks for stage in program.plan.pipeline.stages)
        return NodeStages(groups, {(node, groups[stage]): stage for node, stage in program.stages.items()})
    levels = _levels(program)
    depths = (
        _depths(program)
        if levels is None
        else {
            node: {group: levels[group] for group in program.placement[node].groups if group in levels}
            for node in program.model.graph
        }
    )
    first: dict[tuple[int, Group], int] = {}
    for node, found in depths.items():
        for group, depth in found.items():
            if not program.placement[node].follows:
                first.setdefault((depth, group), len(first))
    order = {key: k for k, key in enumerate(sorted(first, key=lambda key: (key[0], first[key])))}
    stages = {
        (node, group): order[depth, group]
        for node, found in depths.items()
        for group, depth in found.items()
        if not program.placement[node].follows
    }
    return NodeStages(tuple(group for _, group in order), stages)


def in_halves(program: Lowered, stages: NodeStages, stage: int) -> NodeStages:
    """The stages, of which one falls into two: its nodes in the order of the graph, where the weights that they read first are most even.

    A stage of one node stays as it is.
    """
    nodes = [node for node in program.model.graph if stages.of.get((node, stages.groups[stage])) == stage]
    if len(nodes) < 2:
        return stages
    seen: set[ir.Value] = set()
    sums = [0]
    for node in nodes:
        new = {value for value in program.reads[node] if value.is_initializer()} - seen
        seen |= new
        sums.append(sums[-1] + sum(value.const_value.size for value in new if value.const_value is not None))
    middle = len(nodes) / 2
    cut = min(range(1, len(nodes)), key=lambda k: (abs(2 * sums[k] - sums[-1]), abs(k - middle)))
    second = set(nodes[cut:])
    of = {
        (node, group): at + (at > stage or (at == stage and node in second)) for (node, group), at in stages.of.items()
    }
    return NodeStages((*stages.groups[: stage + 1], *stages.groups[stage:]), of)


def _levels(program: Lowered) -> dict[Group, int] | None:
    """Maps each group to the longest path to it, in groups; None where a path returns to a group.

    What runs wherever it is read, and is read by nothing that a stage runs, as the count of all labels, is on no way.
    """
    counts = {node for node, placed in program.placement.items() if not placed.follows}
    before: dict[Group, dict[Group, None]] = {}
    for node in reversed(list(program.model.graph)):
        if node not in counts:
            continue
        made = [p for value in program.reads[node] if (p := value.producer()) is not None]
        counts.update(made)
        sources = [program.placement[producer].groups for producer in made]
        for group in program.placement[node].groups:
            before.setdefault(group, {}).update({groups[0]: None for groups in sources if group not in groups})
    levels: dict[Group, int] = {}
    try:
        for group in TopologicalSorter(before).static_order():
            levels[group] = max((levels[source] + 1 for source in before[group]), default=0)
    except CycleError:
        return None
    return levels


def _depths(program: Lowered) -> dict[ir.Node, dict[Group, int]]:
    """Per node and group the depth: the most changes of group before it; then, for what only later nodes of its group read, theirs."""
    depths: dict[ir.Node, dict[Group, int]] = {}
    readers: dict[ir.Node, list[ir.Node]] = {}
    for node in program.model.graph:
        producers = [made for value in program.reads[node] if (made := value.producer()) in depths]
        for made in producers:
            readers.setdefault(made, []).append(node)
        depths[node] = {}
        for group in program.placement[node].groups:
            ways = [depths[p][group] if group in depths[p] else min(depths[p].values()) + 1 for p in producers]
            depths[node][group] = max(ways, default=0)
    outputs = {value.producer() for value in program.model.graph.outputs}
    for node in reversed(list(program.model.graph)):
        for group in depths[node]:
            at = [depths[one] for one in readers.get(node, ())]
            later = [there[group] for there in at if group in there]
            sent = node in outputs or any(there.keys().isdisjoint(depths[node]) for there in at)
            if later and not sent:
                depths[node][group] = max(depths[node][group], min(later))
    for divisor, mean in program.means.items():
        for group in depths[divisor].keys() & depths[mean].keys():
            depths[divisor][group] = max(depths[divisor][group], depths[mean][group])
    return depths
