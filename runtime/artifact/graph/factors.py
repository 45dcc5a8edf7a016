"""`partc.factors`: the correspondence of the dims of a node's operands, its contracted factors, and its effect on partial values.

    mk,kn->mn; sum k; linear 0, 1        a product: k is summed; either operand may be a partial sum, and then the result is one
    ab,ab->ab; linear 0 + 1; rises       a sum: both operands must be partial sums; a maximum of one operand gives the maximum of results
    .,.->..; linear 0; stacks            a partial sum becomes one row of a value that has the partial sums of all ranks as rows

Each letter stands for one dim, and equal letters for dims of which ranks have the same shards. `.` is a dim without a corresponding one,
`-` an operand that is absent or not a tensor. `sum`, `max`, `min`: letters of inputs that the outputs lack. Facts that are absent are
unknown.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from onnx import NodeProto
from partc.runtime.artifact.format import FACTORS, REDUCTIONS, SUM
from partc.runtime.artifact.graph.onnx_graph import metadata_of

WHOLE = "."
_ABSENT, _LINEAR, _RISES, _MOVES, _STACKS = "-", "linear", "rises", "moves", "stacks"


@dataclass(frozen=True)
class Factors:
    """The letters of a node's operands.

    `reductions`: maps letters that no output has to their reduction. `linear`: the inputs that may be partial sums, all of them together if
    `joint`, else any one. `rises`: the largest of several results is the result of the largest of one operand. `moves`: elements are only
    moved, so that this is true of all operands together. `stacks`: the result is one of the rows that are to be added.
    """

    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    reductions: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[int, ...] = ()
    joint: bool = False
    rises: bool = False
    moves: bool = False
    stacks: bool = False

    def __str__(self) -> str:
        sides = [",".join([_ABSENT if one is None else one for one in side]) for side in (self.inputs, self.outputs)]
        words = ["->".join(sides)]
        for reduction in REDUCTIONS:
            if letters := "".join([letter for letter, one in self.reductions.items() if one == reduction]):
                words.append(f"{reduction} {letters}")
        if self.linear:
            words.append(f"{_LINEAR} {(' + ' if self.joint else ', ').join(map(str, self.linear))}")
        ends = {_STACKS: self.stacks, _MOVES: self.moves, _RISES: self.rises and not self.moves}
        return "; ".join([*words, *[word for word, holds in ends.items() if holds]])


@cache
def read_factors(text: str) -> Factors:
    """Returns the factors of a text; raises ValueError if it is not valid."""
    (sides, *words), reductions = text.split("; "), dict[str, str]()
    left, arrow, right = sides.partition("->")
    if not arrow:
        raise ValueError(text)
    linear: tuple[int, ...] = ()
    joint = rises = moves = stacks = False
    for word in words:
        what, _, said = word.partition(" ")
        if what in REDUCTIONS:
            reductions |= dict.fromkeys(said, what)
        elif what == _LINEAR:
            joint = "+" in said
            linear = tuple(int(number) for number in said.replace("+", ",").split(","))
        elif word in (_RISES, _MOVES, _STACKS):
            rises, moves, stacks = word == _RISES, word == _MOVES, word == _STACKS
        else:
            raise ValueError(text)
    return Factors(_operands(left), _operands(right), reductions, linear, joint, rises, moves, stacks)


def factors_of(node: NodeProto, sizes: Mapping[str, Sequence[int | None]]) -> Factors | None:
    """Returns the letters of a node's operands, or None if the file has none; raises ValueError if they do not fit the operands."""
    if not (text := metadata_of(node, FACTORS)):
        letters = string.ascii_letters[: len(sizes.get(node.input[0]) or ())] if node.op_type == "Identity" else None
        return None if letters is None else Factors((letters,), (letters,), {}, (0,), moves=True)
    factors = read_factors(text)
    if len(factors.inputs) < len(node.input) or len(factors.outputs) < len(node.output):
        raise ValueError(text)
    joined = [
        WHOLE * len(sizes[name])
        if name in sizes and one and not one.strip(WHOLE)
        else one  # axes may be one number, without a dim
        for name, one in zip(node.input, factors.inputs, strict=False)
    ]
    if (inputs := (*joined, *factors.inputs[len(joined) :])) != factors.inputs:
        factors = replace(factors, inputs=inputs)
    sides = (*zip(node.input, factors.inputs, strict=False), *zip(node.output, factors.outputs, strict=False))
    if any(name in sizes and one is not None and len(one) != len(sizes[name]) for name, one in sides):
        raise ValueError(text)
    return factors


def _operands(text: str) -> tuple[str | None, ...]:
    found = tuple([None if one == _ABSENT else one for one in text.split(",")])
    if any(not sign.isalpha() and sign != WHOLE for one in found if one for sign in one):
        raise ValueError(text)
    return found


def partial_of(factors: Factors, terms: Mapping[int, str]) -> str:
    """Returns the reduction that completes a node's result for partial inputs; empty if none does. `terms`: the inputs' reductions."""
    kinds = {*terms.values()}
    if len(kinds) != 1 or factors.stacks:
        return ""
    (kind,) = kinds
    if kind != SUM:
        rises = factors.moves or (factors.rises and len(terms) == 1)
        return kind if rises or kind in factors.reductions.values() else ""
    fits = terms.keys() <= {*factors.linear} and (factors.joint or len(terms) == 1)
    return kind if fits else ""
