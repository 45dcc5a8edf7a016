"""Collectives that are there only for a size: a value arrives cut, and its reader would go on so if a size were known, or another one.

The second are heads: twelve of them cannot be shared by eight ranks, so that what was cut for attention is gathered in front of it, and
all ranks compute all heads. That is legal, and seldom meant: it is told with its bytes, and `--strict` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir
from partc.compiler.analysis.lost import dim_of, how_lost, unknown_dims
from partc.compiler.errors import Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Program
from partc.compiler.ir.value_bytes import bytes_text
from partc.compiler.ops.rule import WHOLE
from partc.compiler.sharding.propagate import Propagation

_BY_EXTENTS = frozenset({"Expand", "Flatten", "Reshape", "Slice", "Squeeze"})
"""Ops whose rule is made of the sizes of their operands."""
_ATTENTION = ("attn", "attention")
Uneven = Callable[[NodeOnGroup, NodeSharding, str, int], int | None]
"""The number of a node's factor, or of its units, that is not divisible by so many shards; None where all are, or one is dynamic."""


def lost_cuts(
    program: Program, choices: Mapping[NodeOnGroup, NodeSharding], propagation: Propagation
) -> tuple[str, ...]:
    """A warning for each sharded value that a reader gathers, because the size of a dim is unknown."""
    return tuple(dict.fromkeys(_warnings(program, choices, propagation)))


def uneven_cuts(
    program: Program, choices: Mapping[NodeOnGroup, NodeSharding], propagation: Propagation, uneven: Uneven
) -> list[Problem]:
    """A problem for each sharded value that a reader gathers, because a number of its own is not divisible by the shards."""
    by_path = {program.paths[instance.node]: choice for instance, choice in choices.items()}
    found: dict[Problem, None] = {}
    for instance, choice, k, value, dim in _gathered(choices, propagation):
        arriving = propagation.layout_of(value, instance.group)
        letters = choice.rule.inputs[k] if k < len(choice.rule.inputs) else None
        letter = WHOLE if letters is None else letters[dim]
        if arriving is None or letter == WHOLE or letter in choice.rule.replicated or letter in choice.axes:
            continue
        shards = arriving[0].num_shards(dim)
        number = uneven(instance, choice, letter, shards)
        where = _line(program, by_path, arriving[1])
        if number is not None and where:
            found[_indivisible(program, instance, value, dim, (number, shards), where)] = None
    return list(found)


def _line(program: Program, by_path: Mapping[str, NodeSharding], decided: str) -> str:
    """The line of the plan or the model that a cut follows, from neighbour to neighbour; empty where an input brings it."""
    for _ in range(len(by_path)):
        if decided not in by_path:
            return decided.split(" ")[0] if ":" in decided else ""
        decided = next(iter(by_path[decided].why.values()), "")
    return ""


def _indivisible(
    program: Program, instance: NodeOnGroup, value: ir.Value, dim: int, numbers: tuple[int, int], where: str
) -> Problem:
    number, shards = numbers
    path, info = program.paths[instance.node], program.values[value]
    what = "heads" if any(word in path.lower() for word in _ATTENTION) else "equal parts"
    size = info.shape[dim] if info.shape is not None else None
    each = f" of {size // number}" if isinstance(size, int) and size % number == 0 and size > number else ""
    legal = [str(n) for n in range(2, number + 1) if number % n == 0]
    fact = f"'{value.name}' is cut into {shards} along dim {dim}, but {path} has {number} {what}{each} there"
    law = (
        f"{number} is not divisible by {shards}: all of its {bytes_text(info, info.shape)} bytes are gathered on each rank, "
        "and what follows is computed whole on all of them"
    )
    help = f"use {', '.join(legal)} ranks for it" if legal else "leave it whole"
    return Problem(where, fact, law, help)


def _warnings(program: Program, choices: Mapping[NodeOnGroup, NodeSharding], propagation: Propagation) -> Iterator[str]:
    for instance, choice, k, value, dim in _gathered(choices, propagation):
        lost = _lost(program, instance, choice, k, dim)
        if lost is not None:
            yield _told(program, instance, value, dim, lost)


def _gathered(
    choices: Mapping[NodeOnGroup, NodeSharding], propagation: Propagation
) -> Iterator[tuple[NodeOnGroup, NodeSharding, int, ir.Value, int]]:
    """The dims that arrive cut and are read whole."""
    for instance, choice in choices.items():
        for k, value in enumerate(instance.node.inputs):
            arriving = None if value is None else propagation.layout_of(value, instance.group)
            wanted = choice.input(k)
            if value is None or arriving is None or wanted is None or len(arriving[0].cuts) != len(wanted.cuts):
                continue
            for dim, (here, there) in enumerate(zip(arriving[0].cuts, wanted.cuts, strict=True)):
                if here and not there:
                    yield instance, choice, k, value, dim


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
