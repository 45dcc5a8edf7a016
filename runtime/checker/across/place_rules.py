"""The rules by which a node carries shard positions and partial values, by the letters of its operands in the artifact
(`partc.factors`).

That the letters are right of each op is not proven here: the compiler's tests run every rule of its op table on shards and compare it with
the whole op. A node without letters is unknown, and never gives a reason for doubt.

A value's places are by dim where the shards of some ranks begin in it, None along a dim of which that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onnx import NodeProto
from partc.runtime.artifact.format import MAX, MIN, SUM
from partc.runtime.artifact.graph.factors import WHOLE, Factors, partial_of

Begins: TypeAlias = tuple[int, ...]
"""For each rank, in the order of a file's ranks, the element at which a shard begins along a dim."""
Places: TypeAlias = "Sequence[Begins | None] | None"
Sizes: TypeAlias = "Sequence[int | None]"

PARTIAL = {SUM: "a partial sum", MAX: "the largest of a shard", MIN: "the least of a shard"}
"""What a value is that a reduction of several ranks makes whole, in words."""


@dataclass(frozen=True)
class Met:
    """A dim of an operand that meets one of another operand."""

    name: str
    begins: Begins | None
    size: int | None


@dataclass(frozen=True)
class Ruled:
    """The effect of a node: the places of its outputs, the pairs of dims that meet in it, each reduction with the begins of its dim."""

    made: list[Places]
    meetings: list[tuple[Met, Met, int]]
    reduced: list[tuple[str, Begins]]


def apply(node: NodeProto, factors: Factors, places: Mapping[str, Places], sizes: Mapping[str, Sizes]) -> Ruled:
    """What a node does with the places of its operands."""
    known: dict[str, Met] = {}
    found = Ruled([], [], [])
    for name, letters in zip(node.input, factors.inputs, strict=False):
        there = places.get(name)
        if letters is None or there is None or len(there) != len(letters):
            continue
        for axis, (letter, begins) in enumerate(zip(letters, there, strict=True)):
            if letter == WHOLE:
                continue
            met = Met(name, begins, sizes[name][axis] if name in sizes else None)
            if letter not in known or known[letter].begins is None:
                known[letter] = met
            else:
                first = known[letter]
                found.meetings.append((first, Met(name, _scaled(met, first.size), first.size), axis))
            if letter in factors.reductions and begins is not None:
                found.reduced.append((factors.reductions[letter], begins))
    for name, letters in zip(node.output, factors.outputs, strict=False):
        if letters is None:
            found.made.append(None)
            continue
        pairs = zip(letters, sizes.get(name) or [None] * len(letters), strict=True)
        found.made.append([_scaled(known[letter], size) if letter in known else None for letter, size in pairs])
    return found


def _scaled(met: Met, size: int | None) -> Begins | None:
    """Where shards begin along a dim of this size on a rank that corresponds to another one; None where that is within an element."""
    if met.begins is None or met.size == size:
        return met.begins
    if not met.size or not size or any(begin * size % met.size for begin in met.begins):
        return None
    return tuple([begin * size // met.size for begin in met.begins])


def passes_partial(node: NodeProto, factors: Factors | None, reductions: Mapping[str, str]) -> str:
    """The reduction of which a node makes a partial value of those that it reads; '' where it makes none, or where that is not known.

    `reductions`: by value that is partial its reduction.
    """
    terms = {k: reductions[name] for k, name in enumerate(node.input) if reductions.get(name)}
    return partial_of(factors, terms) if terms and factors is not None else ""


def misuse(node: NodeProto, factors: Factors | None, reductions: Mapping[str, str]) -> str:
    """Why a node must not read the partial values that it reads; '' where it may, or where nothing is known of it.

    `reductions`: by value of which it is known its reduction, '' of one that is not partial.
    """
    terms = {k: reductions[name] for k, name in enumerate(node.input) if reductions.get(name)}
    if not terms or factors is None:
        return ""
    first, kind = next(iter(terms.items()))
    op, name = node.op_type, node.input[first]
    lost = f"'{name}' is {PARTIAL[kind]} that no collective has reduced"
    if kind != SUM:
        return "" if partial_of(factors, terms) else f"{lost}, and {op} reads it as that of all"
    if not terms.keys() <= {*factors.linear}:
        return f"{lost}, and {op} of a sum is not the sum of {op} of its parts"
    if not factors.joint and len(terms) > 1:
        return f"{lost}, nor is '{node.input[[*terms][1]]}', which it is multiplied by"
    whole = [node.input[k] for k in factors.linear if factors.joint and reductions.get(node.input[k]) == ""]
    return f"{lost}, and '{whole[0]}', which is replicated, would be added on every rank" if whole else ""
