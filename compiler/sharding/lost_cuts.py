"""Collectives that are there only because a size was lost: a value arrives cut, and its reader would go on so if the size were known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir
from partc.compiler.analysis.lost import dim_of, how_lost, unknown_dims
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Program
from partc.compiler.ops.rule import WHOLE
from partc.compiler.sharding.propagate import Propagation

_BY_EXTENTS = frozenset({"Expand", "Flatten", "Reshape", "Slice", "Squeeze"})
"""Ops whose rule is made of the sizes of their operands."""


def lost_cuts(
    program: Program, choices: Mapping[NodeOnGroup, NodeSharding], propagation: Propagation
) -> tuple[str, ...]:
    """A warning for each sharded value that a reader gathers, because the size of a dim is unknown."""
    return tuple(dict.fromkeys(_warnings(program, choices, propagation)))


def _warnings(program: Program, choices: Mapping[NodeOnGroup, NodeSharding], propagation: Propagation) -> Iterator[str]:
    for instance, choice in choices.items():
        for k, value in enumerate(instance.node.inputs):
            arriving = None if value is None else propagation.layout_of(value, instance.group)
            wanted = choice.input(k)
            if value is None or arriving is None or wanted is None or len(arriving[0].cuts) != len(wanted.cuts):
                continue
            for dim, (here, there) in enumerate(zip(arriving[0].cuts, wanted.cuts, strict=True)):
                lost = _lost(program, instance, choice, k, dim) if here and not there else None
                if lost is not None:
                    yield _told(program, instance, value, dim, lost)


def _lost(
    program: Program, instance: NodeOnGroup, choice: NodeSharding, k: int, dim: int
) -> tuple[ir.Value, int | None] | None:
    """The value and dim whose unknown size prevents a dim from being sharded; None where that is not the reason."""
    node, rule = instance.node, choice.rule
    letters = rule.inputs[k] if k < len(rule.inputs) else None
    letter = WHOLE if letters is None else letters[dim]
    if letter in rule.replicated:
        return None
    for row, values in ((rule.inputs, node.inputs), (rule.outputs, node.outputs)):
        for spelled, value in zip(row, values, strict=False):
            for place, each in enumerate(spelled or ""):
                if value is not None and each == letter != WHOLE and dim_of(program, value, place) is None:
                    return value, place
    if letter != WHOLE:
        return None
    for value in (one for one in [*node.inputs, *node.outputs] if one is not None and one.name):
        if value.shape is None and value.dtype is not None:
            return value, None
        if node.op_type in _BY_EXTENTS and (unknown := unknown_dims(program, value)):
            return value, unknown[0]
    return None


def _told(program: Program, instance: NodeOnGroup, value: ir.Value, dim: int, lost: tuple[ir.Value, int | None]) -> str:
    of, place = lost
    what = f"the rank of '{of.name}'" if place is None else f"dim {place} of '{of.name}'"
    law, remedy = how_lost(program, of, place)
    path = program.paths[instance.node]
    return f"'{value.name}' is replicated along dim {dim} for {path}, since {what} is not known: {law}; {remedy}"
