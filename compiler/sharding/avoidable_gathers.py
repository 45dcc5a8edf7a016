"""Finds gathers that another size would avoid: a value arrives sharded, and its reader could read it sharded if a size were known or
divisible.

The indivisible size is often the number of heads: eight ranks cannot share twelve, so a value that is sharded for attention is gathered
before it, and every rank computes all heads. That is legal but seldom intended: it is reported with its bytes, and `--strict` refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.analysis.lost import dim_of, how_lost, unknown_dims
from partc.compiler.errors import Problem
from partc.compiler.ir.choice import NodeOnGroup, NodeSharding
from partc.compiler.ir.program import Placed
from partc.compiler.ir.value_info import bytes_text
from partc.compiler.ops.rule import WHOLE
from partc.compiler.sharding.propagate import Propagation

_BY_EXTENTS = frozenset({"Expand", "Flatten", "Reshape", "Slice", "Squeeze"})
"""Ops whose sharding rule depends on the sizes of their operands."""
_ATTENTION = ("attn", "attention")
Uneven = Callable[[NodeOnGroup, NodeSharding, str, int], int | None]
"""Returns the size of a node's factor, or its number of units, that `shards` does not divide; None where all divide or one is dynamic."""


@dataclass(frozen=True)
class Gathered:
    """A dim of an operand that arrives sharded, by the decision of `why`, and is read unsharded."""

    instance: NodeOnGroup
    choice: NodeSharding
    k: int
    value: ir.Value
    dim: int
    shards: int
    why: str


def gathered_dims(choices: Mapping[NodeOnGroup, NodeSharding], propagation: Propagation) -> Iterator[Gathered]:
    """Yields the dims of operands that arrive sharded and are read unsharded."""
    for instance, choice in choices.items():
        for k, value in enumerate(instance.node.inputs):
            arriving = None if value is None else propagation.layout_of(value, instance.group)
            if value is None or arriving is None or not any(arriving[0].cuts):
                continue
            layout, why = arriving
            wanted = choice.input(k)
            if wanted is None or len(layout.cuts) != len(wanted.cuts):
                continue
            for dim, (here, there) in enumerate(zip(layout.cuts, wanted.cuts, strict=True)):
                if here and not there:
                    yield Gathered(instance, choice, k, value, dim, layout.num_shards(dim), why)


def gathers_of_unknown_sizes(program: Placed, gathered: Iterable[Gathered]) -> tuple[str, ...]:
    """A warning for each sharded value that a reader gathers, because the size of a dim is unknown."""
    found = ((one, _unknown_size(program, one.instance, one.choice, one.k, one.dim)) for one in gathered)
    return tuple(dict.fromkeys(_warning(program, one, lost) for one, lost in found if lost is not None))


def gathers_of_uneven_sizes(
    program: Placed, choices: Mapping[NodeOnGroup, NodeSharding], gathered: Iterable[Gathered], uneven: Uneven
) -> list[Problem]:
    """Returns a problem for each sharded value that a reader gathers because one of the reader's sizes is not divisible by the shards."""
    by_path = {program.paths[instance.node]: choice for instance, choice in choices.items()}
    problems: dict[Problem, None] = {}
    for gather in gathered:
        letters = gather.choice.rule.inputs[gather.k]
        letter = WHOLE if letters is None else letters[gather.dim]
        if letter == WHOLE or letter in gather.choice.rule.replicated or letter in gather.choice.axes:
            continue
        number = uneven(gather.instance, gather.choice, letter, gather.shards)
        where = _line(by_path, gather.why)
        if number is not None and where:
            problems[_indivisible(program, gather, number, where)] = None
    return list(problems)


def _line(by_path: Mapping[str, NodeSharding], decided: str) -> str:
    """Returns the plan's or model's line that a sharding follows, traced through neighbours; empty where it comes from an input."""
    for _ in range(len(by_path)):
        if decided not in by_path:
            return decided.split(" ")[0] if ":" in decided else ""
        decided = next(iter(by_path[decided].why.values()), "")
    return ""


def _indivisible(program: Placed, one: Gathered, number: int, where: str) -> Problem:
    value, dim, shards = one.value, one.dim, one.shards
    path, info = program.paths[one.instance.node], program.values[value]
    what = "heads" if any(word in path.lower() for word in _ATTENTION) else "equal parts"
    size = info.shape[dim] if info.shape is not None else None
    each = f" of {size // number}" if isinstance(size, int) and size % number == 0 and size > number else ""
    legal = [str(n) for n in range(2, number + 1) if number % n == 0]
    fact = f"'{value.name}' is cut into {shards} along dim {dim}, but {path} has {number} {what}{each} there"
    law = (
        f"{number} is not divisible by {shards}: all of its {bytes_text(info, info.shape)} bytes are gathered on each rank, "
        "and every rank repeats what follows"
    )
    help = f"use {', '.join(legal)} ranks for it" if legal else "leave it whole"
    return Problem(where, fact, law, help)


def _unknown_size(
    program: Placed, instance: NodeOnGroup, choice: NodeSharding, k: int, dim: int
) -> tuple[ir.Value, int | None] | None:
    """Returns the value and dim whose unknown size prevents a dim from being sharded; None where an unknown size is not the reason."""
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


def _warning(program: Placed, gather: Gathered, lost: tuple[ir.Value, int | None]) -> str:
    of, place = lost
    what = f"the rank of '{of.name}'" if place is None else f"dim {place} of '{of.name}'"
    law, remedy = how_lost(program, of, place)
    path = program.paths[gather.instance.node]
    return f"'{gather.value.name}' is replicated along dim {gather.dim} for {path}, since {what} is not known: {law}; {remedy}"
