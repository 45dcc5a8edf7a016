"""Prepares local maps before anything is sharded: sets the sizes of their axes, and gives trainable parameters an entry into them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx_ir as ir
from partc.compiler.errors import CompileError, Problem
from partc.compiler.ir.graph import INSIDE, is_inside
from partc.compiler.ops.families.control.local_map import ENTER, LINE, axes_named, is_border, line_of, specs
from partc.compiler.ops.rule import OWN
from partc.compiler.plan.groups import shown_mesh
from partc.compiler.plan.rules import Plan


def with_sizes(model: ir.Model, plan: Plan) -> ir.Model:
    """Sets the number of ranks along each axis in the nodes of local maps: the sizes of the plan's mesh, or 1 for a plan of one rank.

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


def _no_axis(node: ir.Node, axis: str, plan: Plan) -> Problem:
    there = f"the mesh of {plan.file} is {shown_mesh(plan.mesh)}" if plan.mesh else f"{plan.file} has no mesh"
    size = plan.ranks if not plan.mesh else 2
    return Problem(
        line_of(node),
        f"the local map names the axis '{axis}'",
        there,
        f"add a mesh with it to the plan: {{{axis}: {size}}}",
    )


def _beyond(node: ir.Node, axis: str, size: int) -> Iterator[Problem]:
    places = [node.attributes.get_int("root", 0), *(node.attributes.get_ints("sources") or ())]
    for place in (*places, *(node.attributes.get_ints("targets") or ())):
        if not 0 <= place < size:
            law = f"places along '{axis}' are 0 to {size - 1}"
            yield Problem(line_of(node), f"{node.op_type} names place {place}", law, "name one of these")


def refuse_modes(model: ir.Model, paths: Mapping[ir.Node, str]) -> None:
    """Raises CompileError for a BatchNormalization or Dropout inside of a local map, in a plan that trains.

    There each rank would draw its own masks and keep its own statistics.
    """
    problems = [
        Problem(
            paths[node],
            f"a {node.op_type} is inside of a local map, in a plan that trains",
            "masks and running statistics are those of the global tensor",
            "move it out of the function that `local_map` runs",
        )
        for node in model.graph
        if is_inside(node) and node.domain in ("", "ai.onnx") and node.op_type in ("BatchNormalization", "Dropout")
    ]
    if problems:
        raise CompileError(problems)


def enter_parameters(model: ir.Model, learned: Mapping[ir.Value, object]) -> None:
    """Makes trainable parameters that a local map reads enter it replicated, so that the ranks' gradients are partial sums of one."""
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
    entered = ir.Value(name=f"{value.name}.local.{reader.name}", type=value.type, shape=value.shape)
    rank = len(value.shape) if value.shape is not None else 0
    attributes = [ir.AttrStrings("axes", list(axes_named(like))), ir.AttrInt64s("pieces", [1] * rank)]
    node = ir.Node(OWN, ENTER, [value], attributes, outputs=[entered], name=f"{reader.name}.{value.name}", version=1)
    node.metadata_props.update({**reader.metadata_props, LINE: like.metadata_props.get(LINE, "")})
    model.graph.insert_before(reader, node)
    return entered
