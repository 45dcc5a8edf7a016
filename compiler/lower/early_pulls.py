"""Pulls follow each other where ids allow, without computation between them, so that what reads their rows is one segment.

    Pull a, Relu a, Pull b, MatMul, AllReduce      ->      Pull a, Pull b, Relu a, MatMul, AllReduce

A Pull returns when all ranks of its group have given their ids: computation of one rank between two of them would hold up the others.
Events keep their order, which is the same on all ranks, and no op crosses an event of another kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partc.compiler.ir.rank_program import CommOp, ComputeOp, RankOp, made_names, read_names
from partc.runtime.artifact.format import PULL


def pulls_first(steps: Iterable[RankOp]) -> list[RankOp]:
    """The ops in order, of which those that no Pull needs stand behind the Pulls that follow them up to the next event of another kind."""
    found: list[RankOp] = []
    waiting: list[RankOp] = []
    for step in steps:
        if isinstance(step, ComputeOp):
            waiting.append(step)
            continue
        needed, waiting = _divided(waiting, step) if _is_pull(step) else (waiting, [])
        at = _before_pulls(found, needed) if _is_pull(step) else len(found)
        found[at:at] = needed
        found.append(step)
    return [*found, *waiting]


def _is_pull(step: RankOp) -> bool:
    return isinstance(step, CommOp) and step.op_type == PULL


def _before_pulls(found: Sequence[RankOp], needed: Iterable[RankOp]) -> int:
    """Where ops can stand before the Pulls that come last: behind those whose rows they read."""
    read = {name for step in needed for name in read_names(step)}
    at = len(found)
    while at and _is_pull(found[at - 1]) and read.isdisjoint(made_names(found[at - 1])):
        at -= 1
    return at


def _divided(waiting: Iterable[RankOp], pull: RankOp) -> tuple[list[RankOp], list[RankOp]]:
    """The ops that a Pull needs, and the others."""
    wanted = {*read_names(pull)}
    needed: list[RankOp] = []
    others: list[RankOp] = []
    for step in reversed([*waiting]):
        if wanted.isdisjoint(made_names(step)):
            others.append(step)
        else:
            wanted.update(read_names(step))
            needed.append(step)
    return needed[::-1], others[::-1]
