"""The shardings of local maps on the plan's mesh: Enter and Leave as their specs state, the nodes between them unsharded.

spec ((tp,), ()) of an Enter on tp=4:   dim 0 in 4 shards; inside, a value is one rank's shard
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from partc.compiler.dims.expression import facts_of
from partc.compiler.errors import Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.graph import is_inside
from partc.compiler.ir.program import Placed
from partc.compiler.ir.sharded import Group
from partc.compiler.ops.families.control.local_map import (
    ALONG,
    AXIS_INDEX,
    LINE,
    axes_named,
    dims_changed,
    is_border,
    is_collective,
    line_of,
    specs,
)
from partc.compiler.ops.node import LETTERS
from partc.compiler.ops.notation import replicated_rule
from partc.compiler.ops.rule import OWN
from partc.compiler.sharding.seeding.strategy import refined


def seed_local_maps(program: Placed, choices: dict[NodeOnGroup, NodeSharding]) -> list[Problem]:
    """Fixes the shardings of all nodes of local maps in `choices`; returns the problems."""
    problems: list[Problem] = []
    for node in program.model.graph:
        if not is_inside(node):
            continue
        groups = program.placement[node].groups
        if node.domain == OWN:
            problems += [problem for group in groups for problem in _wrong_group(program, node, group)]
            problems += _indivisible(program, node)
        for group in groups:
            choice = choices.get(NodeOnGroup(node, group))
            if choice is None:
                continue
            choice.open = False
            if choice.axes:
                where = next(iter(choice.why.values()), "").split(" ")[0]
                fact = f"{node.op_type} ({program.paths[node]}) is cut, and it is inside of a local map"
                law = "inside, a value is one rank's shard; specs define the sharding"
                problems.append(Problem(where, fact, law, "name nodes outside of it"))
            if node.domain != OWN:
                choice.rule = replicated_rule(node)
            elif not problems:
                _shard(program, node, group, choice)
    return list(dict.fromkeys(problems))


def _shard(program: Placed, node: ir.Node, group: Group, choice: NodeSharding) -> None:
    choice.mesh, named = refined(program.plan.axes_of(group))
    line = node.metadata_props.get(LINE, "")
    if is_border(node):
        cut = specs(node)
        for dim, axes in enumerate(cut):
            if axes:
                choice.axes[LETTERS[dim]] = tuple(part for axis in axes for part in named[axis])
                choice.why[LETTERS[dim]] = line
        rest = [axis for axis in axes_named(node) if all(axis not in axes for axes in cut)]
    else:
        rest = list(axes_named(node)) if node.op_type == AXIS_INDEX else []
    if along := tuple(part for axis in rest for part in named[axis]):
        choice.axes[ALONG] = along
        choice.why[ALONG] = line


def _wrong_group(program: Placed, node: ir.Node, group: Group) -> Iterator[Problem]:
    """Yields the problems of a local map whose group lacks ranks of one of its axes."""
    axes = dict(program.plan.axes_of(group))
    wanted = axes_named(node)
    sizes = dict(program.plan.mesh)
    for axis in wanted:
        if sizes.get(axis, 1) > 1 and program.plan.ranks > 1 and axes.get(axis) != sizes[axis]:
            where = f"ranks {', '.join(map(str, group))}" if len(group) > 1 else f"rank {group[0]}"
            fact = f"the local map of {program.paths[node]} runs on {where} ({program.placement[node].rule})"
            law = f"its axis '{axis}' has {sizes[axis]} ranks, all of which take part"
            yield Problem(line_of(node), fact, law, f"place it on a group that has all of '{axis}'")


def _indivisible(program: Placed, node: ir.Node) -> Iterator[Problem]:
    spec, value = specs(node) if is_border(node) else (), node.inputs[0] if node.inputs else None
    if spec and value is not None and value.shape is not None and len(value.shape) != len(spec):
        fact = f"the spec of '{value.name}' has {len(spec)} entries, and the value {len(value.shape)} dims"
        yield Problem(line_of(node), fact, "a spec has one entry for each dim")
    if not is_collective(node):
        return
    dim, _ = dims_changed(node)
    size = node.attributes.get_int("size", 1)
    x = node.inputs[0]
    assert x is not None
    if x.shape is None or dim is None or size == 1:
        return
    shape = program.values[x].shape
    extent = shape[dim] if shape is not None else None
    known = {name: info.facts for name, info in program.symbols.items()}
    if extent is None or not (
        extent % size == 0 if isinstance(extent, int) else facts_of(extent, known).divisible_by(size)
    ):
        fact = (
            f"{node.op_type}: cannot cut '{x.name}' dim {dim} ({'unknown' if extent is None else extent}) into {size}"
        )
        law = f"the axis '{axes_named(node)[0]}' has {size} ranks, and each gets an equal shard"
        yield Problem(line_of(node), fact, law, "choose another dim, or declare a larger divisor for its symbols")
