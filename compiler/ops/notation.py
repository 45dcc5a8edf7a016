"""The notation of rules: `*mk,*kn->*mn` parsed for the shapes of one node.

A letter is a factor and one dim. `*` is any number of dims that correspond across the operands that have it, aligned at the last one; where
one of them is 1 and another is not, it broadcasts. `.` is one replicated dim and `_` any number of them. `-` is an operand that is not a
tensor, and an operand may be missing. A factor that no output has is contracted. `...` repeats the operand before it as often as the node
has inputs.

    *mk,*kn->*mn    on (5, 2, 6) and (6, 4)     amk,kn->amn
    nc_,oc_,o->no_  on (2, 3, 8, 8), (4, 3, 2, 2) and (4)    nc..,oc..,o->no..
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from partc.compiler.ops.node import LETTERS, Dim, dims, operand, rank_of, same
from partc.compiler.ops.rule import WHOLE, Local, Rule


def replicated_rule(node: ir.Node) -> Rule:
    """The rule by which nothing of a node is sharded."""
    return Rule(
        tuple(None if rank_of(value) is None else WHOLE * len(dims(value) or ()) for value in node.inputs),
        tuple(None if rank_of(value) is None else WHOLE * len(dims(value) or ()) for value in node.outputs),
        linear="",
    )


def rule(
    node: ir.Node,
    factors: str,
    *,
    contracted: Mapping[str, str] | None = None,
    replicated: str = "",
    linear: str | None = None,
    partial: Sequence[int] | None = None,
    local: Callable[[Local], None] | None = None,
    units: Mapping[str, int] | None = None,
) -> Rule | None:
    """The rule that `factors` says of a node; None where an operand has another rank than its part asks for.

    `contracted`: reductions of factors that no output has, sum where not said. The other arguments are those of `Rule`.
    """
    left, _, right = factors.partition("->")
    outs = right.split(",")
    operands = _operands(node, left.split(",") if left else [])
    if operands is None or len(node.outputs) > len(outs):
        return None
    used = set(factors)
    free = [letter for letter in LETTERS if letter not in used]
    common, of_stars = broadcast([one.star for one in operands if one and one.star is not None], free)
    stars = iter(of_stars)
    inputs = tuple(None if one is None else one.letters(stars) for one in operands)
    outputs = tuple(_output(part, common, rank_of(value)) for part, value in zip(outs, node.outputs, strict=False))
    fixed = {WHOLE, *replicated, *(letter for one in outputs if one for letter in one)}
    summed = dict.fromkeys(letter for one in inputs if one for letter in one if letter not in fixed)
    reductions = {letter: (contracted or {}).get(letter, "sum") for letter in summed}
    of_linear = None if partial is None else tuple(partial)
    return Rule(inputs, outputs, reductions, frozenset(replicated), linear, of_linear, local, units or {})


@dataclass(frozen=True)
class _Operand:
    """An operand's letters: those before and after its open dims, and these: `.` for each, or `star`, the dims that broadcast."""

    head: str
    open: str
    tail: str
    star: Sequence[Dim] | None = None

    def letters(self, stars: Iterator[str]) -> str:
        """A letter a dim; those of a star are the next of `stars`."""
        return self.head + (self.open if self.star is None else next(stars)) + self.tail


def _operands(node: ir.Node, parts: list[str]) -> list[_Operand | None] | None:
    """The node's inputs as their parts of the notation read, None for one that is absent; None where one does not fit."""
    if parts and parts[-1] == "...":
        parts = [*parts[:-1], *parts[-2:-1] * (len(node.inputs) - len(parts) + 1)]
    if len(node.inputs) > len(parts):
        return None
    operands: list[_Operand | None] = []
    for k, part in enumerate(parts[: len(node.inputs)]):
        shape = dims(operand(node, k))
        if part == "-" or node.inputs[k] is None:
            operands.append(None)
            continue
        if shape is None:
            return None
        head, sign, tail, count = _opened(part, len(shape))
        if count < 0 or (count and not sign):
            return None
        star = shape[len(head) : len(head) + count] if sign == "*" else None
        operands.append(_Operand(head, WHOLE * count, tail, star))
    return operands


def broadcast(shapes: Sequence[Sequence[Dim]], free: Sequence[str]) -> tuple[str, list[str]]:
    """Letters of shapes that broadcast together, first of the result, then of each.

    Dims of which it is not certain whether they are equal are replicated.
    """
    rank = max(map(len, shapes), default=0)
    common = [WHOLE] * rank
    rows = [[WHOLE] * len(shape) for shape in shapes]
    for place in range(1, rank + 1):
        there = [k for k, shape in enumerate(shapes) if len(shape) >= place]
        large = [k for k in there if shapes[k][-place] != 1] or there
        first = shapes[large[0]][-place]
        if len(large) == 1 or all(same(first, shapes[k][-place]) for k in large):
            common[-place] = free[rank - place]
            for k in large:
                rows[k][-place] = common[-place]
    return "".join(common), ["".join(row) for row in rows]


def _opened(part: str, rank: int) -> tuple[str, str, str, int]:
    """Letters before and after the part's `*` or `_`, that sign, and how many dims it stands for (negative: too few)."""
    for sign in "*_":
        if sign in part:
            head, tail = part.split(sign)
            return head, sign, tail, rank - len(head) - len(tail)
    return part, "", "", rank - len(part)


def _output(part: str, common: str, rank: int | None) -> str | None:
    if part == "-":
        return None
    if "_" not in part:
        return part.replace("*", common)
    return None if rank is None else part.replace("_", WHOLE * (rank - len(part) + 1))
