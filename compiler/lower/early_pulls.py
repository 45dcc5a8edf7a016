"""Pulls follow each other where ids allow, without computation between them, so that what reads their rows is one segment.

    Pull a, Relu a, Pull b, MatMul, AllReduce      ->      Pull a, Pull b, Relu a, MatMul, AllReduce

A Pull returns when all ranks of its group have given their ids: computation of one rank between two of them would hold up the others.
Events keep their order, which is the same on all ranks, and no op crosses an event of another kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from partc.compiler.ir.programs import Comm, Compute
from partc.runtime.artifact.format import PULL


def pulls_first(steps: Iterable[Compute | Comm]) -> list[Compute | Comm]:
    """The ops in order, of which those that no Pull needs stand behind the Pulls that follow them up to the next event of another kind."""
    found: list[Compute | Comm] = []
    waiting: list[Compute | Comm] = []
    for step in steps:
        if isinstance(step, Compute):
            waiting.append(step)
            continue
        needed, waiting = _divided(waiting, step) if _is_pull(step) else (waiting, [])
        at = _before_pulls(found, needed) if _is_pull(step) else len(found)
        found[at:at] = needed
        found.append(step)
    return [*found, *waiting]


def _is_pull(step: Compute | Comm) -> bool:
    return isinstance(step, Comm) and step.op_type == PULL


def _before_pulls(found: Sequence[Compute | Comm], needed: Iterable[Compute | Comm]) -> int:
    """Where ops can stand before the Pulls that come last: behind those whose rows they read."""
    read = {value for step in needed for value in step.reads}
    at = len(found)
    while at and _is_pull(found[at - 1]) and read.isdisjoint(found[at - 1].makes):
        at -= 1
    return at


def _divided(
    waiting: Iterable[Compute | Comm], pull: Compute | Comm
) -> tuple[list[Compute | Comm], list[Compute | Comm]]:
    """The ops that a Pull needs, and the others."""
    wanted = {*pull.reads}
    needed: list[Compute | Comm] = []
    others: list[Compute | Comm] = []
    for step in reversed([*waiting]):
        if wanted.isdisjoint(step.makes):
            others.append(step)
        else:
            wanted.update(step.reads)
            needed.append(step)
    return needed[::-1], others[::-1]
