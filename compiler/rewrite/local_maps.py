"""Local maps on the plan's mesh: how many ranks their axes have, how their borders are cut, and what cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx_ir as ir
from partc.compiler.dims.facts import facts_of
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.graph import INSIDE, is_inside
from partc.compiler.ir.program import Group, Program
from partc.compiler.ops.families.local_map import (
    ALONG,
    AXIS_INDEX,
    ENTER,
    LINE,
    dims_changed,
    is_border,
    is_collective,
    specs,
)
from partc.compiler.ops.node import LETTERS
from partc.compiler.ops.notation import replicated_rule
from partc.compiler.ops.rule import OWN
from partc.compiler.plan.groups import shown_mesh
from partc.compiler.plan.rules import Plan
from partc.compiler.sharding.strategy import refined


def with_sizes(model: ir.Model, plan: Plan) -> ir.Model:
    """The model, whose local maps know how many ranks each axis has: those of the plan's mesh, on one rank 1.

    Raises CompileError for axes that the mesh does not have, and for roots and pairs beyond an axis.
    """
    mesh = dict(plan.mesh)
    problems: list[Problem] = []
    for node in model.graph:
        if node.domain != OWN or not is_inside(node):
            continue
        named = axes_named(node)
        missing = [axis for axis in named if axis not in mesh] if plan.ranks > 1 else []
        for axis in missing:
            problems.append(_no_axis(node, axis, plan))
        sizes = {axis: mesh.get(axis, 1) if plan.ranks > 1 else 1 for axis in named}
        if is_border(node):
            pieces = [math.prod(sizes[axis] for axis in dim) for dim in specs(node)]
            node.attributes["pieces"] = ir.AttrInt64s("pieces", pieces)
        else:
            size = sizes[named[0]]
            node.attributes["size"] = ir.AttrInt64("size", size)
            problems += _beyond(node, named[0], size) if not missing and plan.ranks > 1 else ()
    if problems:
        raise CompileError(list(dict.fromkeys(problems)))
    return model


def axes_named(node: ir.Node) -> tuple[str, ...]:
    """The mesh axes that a border or a collective names."""
    if is_border(node):
        return tuple(node.attributes.get_strings("axes") or ())
    return (node.attributes.get_string("axis", ""),)


def seed_local_maps(program: Program, choices: dict[NodeOnGroup, NodeSharding]) -> list[Problem]:
    """Closes the choices of all nodes of local maps: borders as their specs say, what is between them uncut."""
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
                law = "inside, a value is what one rank has; specs say how the whole is cut"
                problems.append(Problem(where, fact, law, "name what is outside of it"))
            if node.domain != OWN:
                choice.rule = replicated_rule(node)
            elif not problems:
                _cut(program, node, group, choice)
    return list(dict.fromkeys(problems))


def _cut(program: Program, node: ir.Node, group: Group, choice: NodeSharding) -> None:
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


def _wrong_group(program: Program, node: ir.Node, group: Group) -> Iterator[Problem]:
    """A local map runs where all of its axes are."""
    axes = dict(program.plan.axes_of(group))
    wanted = axes_named(node)
    sizes = dict(program.plan.mesh)
    for axis in wanted:
        if sizes.get(axis, 1) > 1 and program.plan.ranks > 1 and axes.get(axis) != sizes[axis]:
            where = f"ranks {', '.join(map(str, group))}" if len(group) > 1 else f"rank {group[0]}"
            fact = f"the local map of {program.paths[node]} runs on {where} ({program.placement[node].rule})"
            law = f"its axis '{axis}' has {sizes[axis]} ranks, all of which take part"
            yield Problem(_line(node), fact, law, f"place it on a group that has all of '{axis}'")


def _indivisible(program: Program, node: ir.Node) -> Iterator[Problem]:
    spec, value = specs(node) if is_border(node) else (), node.inputs[0] if node.inputs else None
    if spec and value is not None and value.shape is not None and len(value.shape) != len(spec):
        fact = f"the spec of '{value.name}' has {len(spec)} entries, and the value {len(value.shape)} dims"
        yield Problem(_line(node), fact, "a spec has one entry for each dim")
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
        law = f"the axis '{axes_named(node)[0]}' has {size} ranks, and each gets an equal piece"
        yield Problem(_line(node), fact, law, "choose another dim, or give its symbols a larger divisor")


def _no_axis(node: ir.Node, axis: str, plan: Plan) -> Problem:
    there = f"the mesh of {plan.file} is {shown_mesh(plan.mesh)}" if plan.mesh else f"{plan.file} has no mesh"
    size = plan.ranks if not plan.mesh else 2
    return Problem(
        _line(node),
        f"the local map names the axis '{axis}'",
        there,
        f"give the plan a mesh with it, {{{axis}: {size}}}",
    )


def _beyond(node: ir.Node, axis: str, size: int) -> Iterator[Problem]:
    places = [node.attributes.get_int("root", 0), *(node.attributes.get_ints("sources") or ())]
    for place in (*places, *(node.attributes.get_ints("targets") or ())):
        if not 0 <= place < size:
            law = f"places along '{axis}' are 0 to {size - 1}"
            yield Problem(_line(node), f"{node.op_type} names place {place}", law, "name one of these")


def _line(node: ir.Node) -> str:
    return node.metadata_props.get(LINE, "")


def refuse_modes(model: ir.Model, paths: Mapping[ir.Node, str]) -> None:
    """Raises CompileError for what a plan that trains changes, inside of a local map: there ranks would draw and keep each its own."""
    problems = [
        Problem(
            paths[node],
            f"a {node.op_type} is inside of a local map, in a plan that trains",
            "masks and running statistics are those of the whole tensor",
            "move it out of the function that `local_map` runs",
        )
        for node in model.graph
        if is_inside(node) and node.domain in ("", "ai.onnx") and node.op_type in ("BatchNormalization", "Dropout")
    ]
    if problems:
        raise CompileError(problems)


def enter_parameters(model: ir.Model, learned: Mapping[ir.Value, object]) -> None:
    """Parameters that nodes of a local map read enter it whole, so that the ranks' gradients are terms of one."""
    entered: dict[tuple[str, ir.Value], ir.Value] = {}
    borders = {node.metadata_props[INSIDE]: node for node in reversed(list(model.graph)) if is_border(node)}
    for node in list(model.graph):
        if not is_inside(node) or (is_border(node) and node.op_type == ENTER):
            continue
        key = node.metadata_props[INSIDE]
        for k, value in enumerate(node.inputs):
            if value is None or value not in learned:
                continue
            if (key, value) not in entered:
                entered[key, value] = _enter(model, borders[key], node, value)
            node.replace_input_with(k, entered[key, value])


def _enter(model: ir.Model, like: ir.Node, reader: ir.Node, value: ir.Value) -> ir.Value:
    made = ir.Value(name=f"{value.name}.local.{reader.name}", type=value.type, shape=value.shape)
    rank = len(value.shape) if value.shape is not None else 0
    attributes = [ir.AttrStrings("axes", list(axes_named(like))), ir.AttrInt64s("pieces", [1] * rank)]
    node = ir.Node(OWN, ENTER, [value], attributes, outputs=[made], name=f"{reader.name}.{value.name}", version=1)
    node.metadata_props.update({**reader.metadata_props, LINE: like.metadata_props.get(LINE, "")})
    model.graph.insert_before(reader, node)
    return made
